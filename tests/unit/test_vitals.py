"""What is read from a worker's `/metrics`."""

from proxy.vitals import vitals
from router.workers import UNKNOWN_GENERATION

TWO_RANKS = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="300"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0
"""


def test_each_rank_has_its_own() -> None:
    """But for the blocks: there vLLM shows the sum over all ranks at each of them."""
    first, second = vitals(TWO_RANKS, 0), vitals(TWO_RANKS, 1)
    assert (first.running, first.waiting, first.kv_usage, first.num_blocks) == (3, 1, 0.25, 150)
    assert (second.running, second.waiting, second.kv_usage, second.num_blocks) == (5, 0, 0.75, 150)
    assert first.generation == second.generation == "1700000000.0"


def test_without_a_rank_it_is_all_of_them_together() -> None:
    seen = vitals(TWO_RANKS)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.block_size, seen.num_blocks) == (8, 1, 0.5, 16, 300)


def test_rank_that_is_not_told_of_has_a_block_size_and_no_load() -> None:
    seen = vitals(TWO_RANKS, 2)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.block_size) == (None, None, None, 16)


def test_nothing_told_is_nothing_known() -> None:
    seen = vitals("")
    assert seen.generation == UNKNOWN_GENERATION
    assert (seen.block_size, seen.num_blocks, seen.running, seen.kv_usage) == (None, None, None, None)


def test_values_that_are_no_numbers_are_not_counted() -> None:
    seen = vitals(
        'vllm:num_requests_running{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="0"} NaN\n'
        'vllm:cache_config_info{block_size="None",num_gpu_blocks="0"} 1.0\n'
    )
    assert (seen.running, seen.kv_usage, seen.block_size, seen.num_blocks) == (None, None, None, None)
