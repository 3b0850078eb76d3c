"""Options of a local engine as vLLM's command line and environment."""

import json
from pathlib import Path

import pytest

from deploy.local.layout import Layout
from deploy.local.options import EngineOptions, command, environment

LAYOUT = Layout(Path("/somewhere"))


def value_of(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def kv_config(options: EngineOptions) -> dict[str, object]:
    config = json.loads(value_of(command(options, LAYOUT, 1), "--kv-transfer-config"))
    assert isinstance(config, dict)
    return config


def test_an_engine_listens_on_loopback_and_can_render() -> None:
    line = command(EngineOptions("prefill"), LAYOUT, 8100)
    assert line[:3] == ["/somewhere/engine/bin/vllm", "serve", "/somewhere/model"]
    assert value_of(line, "--host") == "127.0.0.1"
    assert value_of(line, "--port") == "8100"
    assert value_of(line, "--served-model-name") == "tiny"
    assert "--enable-scale-out" in line


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_the_connector_knows_its_role_and_moves_cache_both_ways(role: str, kv_role: str) -> None:
    config = kv_config(EngineOptions("prefill" if role == "prefill" else "decode"))
    assert config["kv_role"] == kv_role
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True, "num_threads": 0}


def test_settings_that_are_not_given_are_left_to_vllm() -> None:
    line = command(EngineOptions("decode"), LAYOUT, 1)
    for option in ("--num-gpu-blocks-override", "--block-size", "--reasoning-parser", "--data-parallel-size"):
        assert option not in line
    assert "kv_load_failure_policy" not in kv_config(EngineOptions("decode"))


def test_settings_that_are_given_arrive() -> None:
    options = EngineOptions(
        "decode",
        dtype="bfloat16",
        prefix_caching=True,
        decoder_kv_blocks_ttl=45,
        kv_recompute_threshold=0,
        kv_load_failure_policy="recompute",
        block_size=64,
        num_gpu_blocks_override=40,
        reasoning_parser="qwen3",
        tool_call_parser=None,
        extra_args=("--max-num-seqs", "4"),
    )
    line = command(options, LAYOUT, 1)
    assert value_of(line, "--dtype") == "bfloat16"
    assert "--enable-prefix-caching" in line
    assert value_of(line, "--block-size") == "64"
    assert value_of(line, "--num-gpu-blocks-override") == "40"
    assert value_of(line, "--reasoning-parser") == "qwen3"
    assert "--tool-call-parser" not in line
    assert line[-2:] == ["--max-num-seqs", "4"]
    config = kv_config(options)
    assert config["kv_load_failure_policy"] == "recompute"
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["decoder_kv_blocks_ttl"] == 45
    assert extra["kv_recompute_threshold"] == 0


def test_the_environment_pins_and_can_be_added_to() -> None:
    env = environment(
        EngineOptions("decode", extra_env={"VLLM_LOGGING_LEVEL": "DEBUG"}),
        side_channel_port=5600,
        core=1,
        base={"HOME": "/home/someone", "OMP_NUM_THREADS": "8"},
    )
    assert env["HOME"] == "/home/someone"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_every_data_parallel_rank_has_its_share_of_what_is_bound() -> None:
    options = EngineOptions("decode", data_parallel_size=2)
    line = command(options, LAYOUT, 1)
    assert value_of(line, "--data-parallel-size") == "2"
    assert value_of(line, "--api-server-count") == "1"
    assert environment(options, side_channel_port=5600, core=1, base={})["VLLM_CPU_OMP_THREADS_BIND"] == "1|1"
