"""`turnback bench` on a real prefill and decode pair on this machine's CPU, by length of context.

`python -m bench.on_pair` starts the pair and a router, and serves the same conversations with reuse and without, and
once more past the TTL. It does so twice: with no prefix cache on prefill, so that what the last turn had is on decode
alone; and with one, so that prefill has it too, but for the last answer. Fails if an answer with reuse is another than
without, or if anything is reused past the TTL. What else is on the command line goes to `turnback bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from bench.failure import BenchFailure
from bench.second_turn.routers import Router
from deploy.local.failure import LocalFailure
from deploy.local.layout import PROJECT, Layout
from deploy.local.options import EngineOptions
from deploy.local.progress import Progress
from deploy.local.serve import running_pair

CONTEXTS = (2000, 4000, 8000, 16000)
TTL_SECONDS = 120
"""Longer than the longest turn without reuse takes on a busy machine, and short enough to wait for."""
MARGIN_SECONDS = 5

PREFIX_CACHES = {"no-prefix-cache": False, "prefix-cache": True}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if it failed."""
    given, more = _parser().parse_known_args(arguments)
    progress = Progress()
    try:
        codes = [_run(name, given, more, progress) for name in given.only or PREFIX_CACHES]
    except (LocalFailure, BenchFailure) as failure:
        progress.note(f"{type(failure).__name__}: {failure}")
        return 1
    return max(codes)


def _run(name: str, given: argparse.Namespace, more: Sequence[str], progress: Progress) -> int:
    key = secrets.token_hex(8)
    output = given.output / name
    output.parent.mkdir(parents=True, exist_ok=True)
    progress.note(f"\n{name}: prefill {'has a' if PREFIX_CACHES[name] else 'has no'} prefix cache")
    with ExitStack() as stack:
        prefill = EngineOptions("prefill", prefix_caching=PREFIX_CACHES[name])
        pair = running_pair(prefill, EngineOptions("decode", decoder_kv_blocks_ttl=given.ttl), progress)
        stack.callback(pair.stop)
        told = ["--decoder-kv-blocks-ttl", str(given.ttl), "--decoder-kv-blocks-margin", str(MARGIN_SECONDS)]
        router = Router(f"multiturn-{name}", pair, "--admin-key", key, "--retained-watch-interval", "1", *told)
        stack.callback(router.stop)
        asyncio.run(_ready(router))
        command = [sys.executable, "-m", "proxy.cli", "bench", "--url", router.url, "--output", str(output.resolve())]
        command += ["--contexts", *map(str, given.contexts), "--conversations", str(given.conversations)]
        command += ["--tool-tokens", "40", "--answer-tokens", "32", "--pause", "0.5"]
        command += ["--ttl", str(given.ttl), "--past-ttl", str(len(given.contexts))]
        command += ["--require-equal", "--delete-ended", *more]
        return subprocess.run(
            command, cwd=PROJECT, env={**os.environ, "TURNBACK_BENCH_ADMIN_KEY": key}, check=False
        ).returncode


async def _ready(router: Router) -> None:
    async with aiohttp.ClientSession() as session:
        await router.ready(session)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.on_pair", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="TOKENS")
    parser.add_argument(
        "--conversations", type=int, default=5, metavar="N", help="of each context; default: %(default)s"
    )
    parser.add_argument("--ttl", type=int, default=TTL_SECONDS, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--only", choices=PREFIX_CACHES, nargs="+", help="one of the two")
    parser.add_argument(
        "--output",
        type=Path,
        default=Layout.default().directory / "bench",
        metavar="FOLDER",
        help="where the results go; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
