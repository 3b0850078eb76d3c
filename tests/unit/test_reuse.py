"""What is decided about an entry, and the reason given for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from metadata_store import Record
from router.fingerprint import Scope, fingerprint
from router.kv_params import KvParams
from router.reuse import Conditions, NoReuse, Outcome, Reason, Reuse, decide, holder_state, known_tokens
from router.workers import Capabilities, Role, Worker
from tests.unit.records import record
from tests.unit.test_kv_params import RETAINED, params

SCOPE = Scope(secret=b"s" * 32, model="m", cache_salt="")
HELD = [number * 3 for number in range(50)]
MORE = [1, 1, 2]


def entry(held: Sequence[int] = HELD, **params: Any) -> Record:
    return record(
        1000.0,
        worker="http://d",
        generation="g1",
        params=msgspec.json.encode(RETAINED | {"remote_num_tokens": len(held)} | params),
        fingerprint=fingerprint(held, SCOPE),
    )


def worker(role: Role, generation: str = "g1", block_size: int | None = 16) -> Worker:
    return Worker(f"http://{role[0]}", role, capabilities=Capabilities(generation, block_size=block_size))


def decided(
    of: Record,
    prompt: Sequence[int],
    *,
    now: float = 1.0,
    holder: Worker | None = None,
    prefill: Worker | None = None,
    scope: Scope = SCOPE,
    min_tokens: int = 16,
) -> tuple[Outcome, Reason, int]:
    decision = decide(
        of,
        prompt,
        holder or worker(Role.DECODE),
        prefill or worker(Role.PREFILL),
        Conditions(now, scope, min_tokens),
    )
    return decision.outcome, decision.reason, decision.tokens if isinstance(decision, Reuse) else 0


def test_history_that_came_back_is_a_hit() -> None:
    assert decided(entry(), HELD + MORE) == (Outcome.HIT, Reason.ALL_HELD, 50)


def test_history_that_changed_is_reused_up_to_there() -> None:
    prompt = [*HELD[:40], 7, 7, 7]
    assert decided(entry(), prompt) == (Outcome.PARTIAL, Reason.COMMON_PREFIX, 32)


def test_same_prompt_again_leaves_its_last_token_to_compute() -> None:
    assert decided(entry(), HELD) == (Outcome.PARTIAL, Reason.COMMON_PREFIX, 49)


def test_prompt_that_is_cut_short_is_reused_but_for_its_last_token() -> None:
    assert decided(entry(), HELD[:32]) == (Outcome.PARTIAL, Reason.COMMON_PREFIX, 31)


@pytest.mark.parametrize("prompt", [[7, *HELD], HELD[1:], [7], [7] * 100])
def test_other_beginning_diverges(prompt: list[int]) -> None:
    assert decided(entry(), prompt) == (Outcome.DIVERGED, Reason.OTHER_TOKENS, 0)


def test_empty_prompt_reuses_nothing() -> None:
    assert decided(entry(), [])[2] == 0


@pytest.mark.parametrize(
    "scope", [Scope(b"s" * 32, "other", ""), Scope(b"s" * 32, "m", "salt"), Scope(b"t" * 32, "m", "")]
)
def test_other_model_or_salt_diverges(scope: Scope) -> None:
    assert decided(entry(), HELD + MORE, scope=scope) == (Outcome.DIVERGED, Reason.OTHER_TOKENS, 0)


@pytest.mark.parametrize(("min_tokens", "reused"), [(0, 50), (50, 50), (51, 0)])
def test_fewer_tokens_than_the_threshold_are_left_to_prefill(min_tokens: int, reused: int) -> None:
    outcome, reason, tokens = decided(entry(), HELD + MORE, min_tokens=min_tokens)
    assert tokens == reused
    if not reused:
        assert (outcome, reason) == (Outcome.UNSUPPORTED, Reason.BELOW_THRESHOLD)


def test_prefix_below_the_threshold_diverges() -> None:
    assert decided(entry(), [*HELD[:40], 7], min_tokens=33) == (Outcome.DIVERGED, Reason.OTHER_TOKENS, 0)


@pytest.mark.parametrize(
    ("now", "outcome"), [(999.9, Outcome.HIT), (1000.0, Outcome.EXPIRED), (5000.0, Outcome.EXPIRED)]
)
def test_entry_is_not_used_from_its_deadline_on(now: float, outcome: Outcome) -> None:
    assert decided(entry(), HELD + MORE, now=now)[0] is outcome


def test_blocks_of_an_earlier_start_of_decode_are_stale() -> None:
    restarted = worker(Role.DECODE, generation="g2")
    assert decided(entry(), HELD + MORE, holder=restarted) == (Outcome.STALE, Reason.WORKER_RESTARTED, 0)


def test_blocks_of_a_decode_that_was_not_probed_again_are_stale() -> None:
    assert holder_state(entry(), Worker("http://d", Role.DECODE), 1.0) == NoReuse(
        Outcome.STALE, Reason.WORKER_RESTARTED
    )


def test_blocks_of_a_decode_that_left_the_pool_are_stale() -> None:
    decision = decide(entry(), HELD + MORE, None, worker(Role.PREFILL), Conditions(1.0, SCOPE, 16))
    assert decision == NoReuse(Outcome.STALE, Reason.WORKER_GONE)
    assert holder_state(entry(), None, 1.0) == decision


def test_decode_that_may_still_hold_it_is_no_reason_against() -> None:
    assert holder_state(entry(), worker(Role.DECODE), 1.0) is None


@pytest.mark.parametrize(
    "prefill",
    [worker(Role.PREFILL, block_size=32), worker(Role.PREFILL, block_size=None), Worker("http://p", Role.PREFILL)],
)
def test_block_sizes_that_are_unknown_or_differ_are_not_supported(prefill: Worker) -> None:
    assert decided(entry(), HELD + MORE, prefill=prefill) == (Outcome.UNSUPPORTED, Reason.BLOCK_SIZE, 0)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b'{"remote_num_tokens":"many"}'])
def test_malformed_parameters_are_not_supported(raw: bytes) -> None:
    broken = msgspec.structs.replace(entry(), params=raw)
    assert decided(broken, HELD + MORE) == (Outcome.UNSUPPORTED, Reason.MALFORMED_PARAMS, 0)


@pytest.mark.parametrize(
    "changes", [{"remote_host": None}, {"remote_block_ids": [[1, 2]]}, {"remote_block_ids": [[1, 2, 3, 4, 5], [6]]}]
)
def test_parameters_that_do_not_fit_are_not_supported(changes: dict[str, Any]) -> None:
    assert decided(entry(**changes), HELD + MORE) == (Outcome.UNSUPPORTED, Reason.MALFORMED_PARAMS, 0)


@pytest.mark.parametrize(
    "changes", [{"remote_block_ids": [[1, 2, 3, 4], [6]]}, {"dcp_size": 2, "remote_block_ids": [[1, 2]]}]
)
def test_all_or_nothing_where_no_prefix_can_be_cut_out(changes: dict[str, Any]) -> None:
    assert decided(entry(**changes), HELD + MORE) == (Outcome.HIT, Reason.ALL_HELD, 50)
    assert decided(entry(**changes), [*HELD[:48], 7, 7, 7])[0] is Outcome.DIVERGED
    assert decided(entry(**changes), HELD)[0] is Outcome.DIVERGED


def test_tokens_that_decode_did_not_tell_are_not_reused() -> None:
    """Decode holds 60, of which 50 are known."""
    assert decided(entry(remote_num_tokens=60), HELD + MORE) == (Outcome.PARTIAL, Reason.COMMON_PREFIX, 50)


def test_hit_cuts_blocks_that_were_reserved_ahead() -> None:
    decision = decide(
        entry(remote_block_ids=[[5, 6, 7, 9, 10, 11]]),
        HELD + MORE,
        worker(Role.DECODE),
        worker(Role.PREFILL),
        Conditions(1.0, SCOPE, 16),
    )
    assert isinstance(decision, Reuse)
    assert bytes(decision.params["remote_block_ids"]) == b"[[5,6,7,9]]"


# --- what decode holds after an answer -----------------------------------------------------------------

PROMPT = [1, 2, 3, 4]
EVERYTHING = [*PROMPT, 5, 6, 7]


def held(tokens: int, prompt: list[int] | None, everything: list[int] | None, **changes: Any) -> Sequence[int] | None:
    return known_tokens(params(remote_num_tokens=tokens, **changes), prompt, everything)


def test_last_generated_token_has_no_kv_yet() -> None:
    assert held(6, PROMPT, EVERYTHING) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tokens", [4, 5, 7, 9])
def test_count_that_does_not_come_out_leaves_only_the_prompt_certain(tokens: int) -> None:
    assert held(tokens, PROMPT, EVERYTHING) == PROMPT


def test_generated_ids_that_were_not_told_leave_only_the_prompt_certain() -> None:
    assert held(6, PROMPT, None) == PROMPT


def test_nothing_is_certain_where_decode_holds_less_than_the_prompt() -> None:
    assert held(3, PROMPT, EVERYTHING) is None


def test_nothing_is_certain_where_nothing_was_told() -> None:
    assert held(6, None, None) is None


def test_prompt_alone_is_of_no_use_where_no_prefix_can_be_cut_out() -> None:
    assert held(6, PROMPT, None, dcp_size=2) is None
    assert held(6, PROMPT, EVERYTHING, dcp_size=2) == [1, 2, 3, 4, 5, 6]


def test_known_tokens_are_what_the_next_turn_is_compared_with() -> None:
    known = known_tokens(KvParams(entry().params), HELD[:20], [*HELD, 9])
    assert known is not None
    stored = msgspec.structs.replace(entry(), fingerprint=fingerprint(known, SCOPE))
    assert decided(stored, [*HELD, 9, *MORE]) == (Outcome.HIT, Reason.ALL_HELD, 50)
