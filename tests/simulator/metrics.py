"""What an engine shows on `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from .core import Core


def exposition(core: Core, start_time: float) -> str:
    """The families a router reads, and one that it does not know."""
    core.memory.reap()
    options = core.options
    labels = f'engine="0",model_name="{options.model}"'
    cache = (
        f'block_size="{options.block_size}",cache_dtype="auto",enable_prefix_caching='
        f'"{options.prefix_caching}",engine="0",num_cpu_blocks="None",num_gpu_blocks="{options.num_blocks}"'
    )
    families = [
        ("process_start_time_seconds", "gauge", "", start_time),
        ("vllm:cache_config_info", "gauge", cache, 1.0),
        ("vllm:kv_cache_usage_perc", "gauge", labels, core.memory.pool.usage),
        ("vllm:num_requests_running", "gauge", labels, float(len(core.running))),
        ("vllm:num_requests_waiting", "gauge", labels, float(len(core.waiting))),
        ("vllm:prompt_tokens_total", "counter", labels, float(core.computed_tokens)),
        ("vllm:sim_unknown", "gauge", labels + ',odd="a\\"b"', float("nan")),
    ]
    lines = []
    for name, kind, inside, value in families:
        braces = f"{{{inside}}}" if inside else ""
        lines += [f"# HELP {name} Simulated.", f"# TYPE {name} {kind}", f"{name}{braces} {value!r}"]
    return "\n".join(lines) + "\n"
