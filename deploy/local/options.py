"""What one engine of the local pair is started with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deploy.local.layout import Layout
from deploy.local.ports import LOOPBACK

Role = Literal["prefill", "decode"]
MODEL_NAME = "tiny"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one vLLM server. `None` leaves the choice to vLLM, or says so below."""

    role: Role
    # HTTP and NIXL side channel, on the loopback interface; None: a free one.
    port: int | None = None
    side_channel_port: int | None = None
    # The core the whole process tree is pinned to; None: the first core this process may use for
    # prefill, the second for decode.
    core: int | None = None
    # float32, because a greedy answer is then the same with and without reuse. bfloat16 has
    # near-ties that flip.
    dtype: str = "float32"
    # Off, so that what an answer rests on came over the wire in this very turn. With a cache on
    # decode, an answer made from wrong blocks is repeated for the same prompt, and a comparison
    # of the two finds them equal; with one on prefill, prefill has most of the history itself.
    prefix_caching: bool = False
    # How long decode keeps the blocks of a finished turn, in seconds.
    decoder_kv_blocks_ttl: int | None = None
    # How long prefill keeps blocks for a decode worker that does not renew, in seconds.
    kv_lease_duration: int | None = None
    # Fewer new tokens than this are computed rather than read.
    kv_recompute_threshold: int | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] | None = None
    # 128 tokens a block on the CPU, unless given.
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    max_model_len: int = 32_768
    kv_cache_gib: int = 1
    tool_call_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    bidirectional: bool = True
    # Ranks behind the one URL, each an engine with a cache of its own; all on the same core. The
    # side channel takes as many ports, from the given one on.
    data_parallel_size: int = 1
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


def command(options: EngineOptions, layout: Layout, port: int) -> list[str]:
    """The command line of the server."""
    line = [
        str(layout.engine / "bin" / "vllm"),
        "serve",
        str(layout.model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--dtype",
        options.dtype,
        "--max-model-len",
        str(options.max_model_len),
        "--enforce-eager",
        # Opens /v1/chat/completions/render and its siblings.
        "--enable-scale-out",
        "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
        "--kv-transfer-config",
        json.dumps(kv_transfer_config(options)),
    ]
    if options.tool_call_parser is not None:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", options.tool_call_parser]
    if options.reasoning_parser is not None:
        line += ["--reasoning-parser", options.reasoning_parser]
    if options.block_size is not None:
        line += ["--block-size", str(options.block_size)]
    if options.num_gpu_blocks_override is not None:
        line += ["--num-gpu-blocks-override", str(options.num_gpu_blocks_override)]
    if options.data_parallel_size > 1:
        # One API server, or each would count its own share of the ranks' load.
        line += ["--data-parallel-size", str(options.data_parallel_size), "--api-server-count", "1"]
    return [*line, *options.extra_args]


def kv_transfer_config(options: EngineOptions) -> dict[str, object]:
    """The connector's settings, only those that are given."""
    extra: dict[str, object] = {"bidirectional_kv_xfer": options.bidirectional, "num_threads": 0}
    optional = {
        "decoder_kv_blocks_ttl": options.decoder_kv_blocks_ttl,
        "kv_lease_duration": options.kv_lease_duration,
        "kv_recompute_threshold": options.kv_recompute_threshold,
    }
    extra |= {name: value for name, value in optional.items() if value is not None}
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if options.role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }
    if options.kv_load_failure_policy is not None:
        config["kv_load_failure_policy"] = options.kv_load_failure_policy
    return config


def environment(
    options: EngineOptions, side_channel_port: int, core: int, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The server's environment: `base`, what a small machine needs, what the options add."""
    return {
        **base,
        # One core each, and nothing that spins on it: a waiting OpenMP thread would take the
        # core from the engine's other processes.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join([str(core)] * options.data_parallel_size),
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        # Loopback only.
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        # What vLLM sets itself, unless a plugin has imported NIXL before it.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        **options.extra_env,
    }
