"""Make NIXL a good neighbour on a machine with a core per engine.

Two things that are right on a large machine starve the model on a small one:

- NIXL's Python API fixes its progress thread's delay at 0: one thread per worker that spins.
- vLLM's connector moves the worker's main thread to the last core of the machine, away from the
  threads that compute. With one core per engine that thread is the one that computes, and all
  engines end up on the same core.
"""

from __future__ import annotations

import importlib
from typing import Any

DELAY_MICROSECONDS = 100_000
BINDINGS = ("nixl_cu13._bindings", "nixl_cu12._bindings")


def register() -> None:
    """Change both, in whichever NIXL build is installed. Safe to call again."""
    for name in BINDINGS:
        try:
            bindings: Any = importlib.import_module(name)
        except ImportError:
            continue
        if not getattr(bindings.nixlAgent, "is_quiet", False):
            bindings.nixlAgent = _quiet(bindings.nixlAgent)
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    # All the connector asks it for is which core to move to.
    platform.discover_numa_topology = classmethod(lambda cls: [])


def _quiet(agent: Any) -> Any:
    def make(name: str, config: Any) -> Any:
        config.pthrDelay = DELAY_MICROSECONDS
        return agent(name, config)

    make.is_quiet = True  # type: ignore[attr-defined]
    return make
