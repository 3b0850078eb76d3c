"""Whatever ``decide`` lets through, the engine takes as computed only tokens that are the prompt's own.

The engine is ``faithful_engine``. That it can tell right from wrong is itself tested: careless versions
of ``decide`` must be caught by the very same check.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from metadata_store import Record
from router.fingerprint import Scope, fingerprint
from router.kv_params import KvParams, Members
from router.reuse import Conditions, NoReuse, Outcome, Reason, Reuse, decide
from router.workers import Capabilities, Role, Worker
from tests.unit.faithful_engine import Computed, Decode, EngineFails, Kind, Prefill

SCOPE = Scope(secret=b"k" * 32, model="m", cache_salt="")
LONGEST = 400


@dataclass(frozen=True)
class Case:
    """One turn: what decode retains and was told about it, the next prompt, and both engines."""

    held: list[int]
    covered: int
    """How many of ``held`` the fingerprint covers."""
    said: int
    """``remote_num_tokens``."""
    prompt: list[int]
    decode_blocks: int
    prefill_blocks: int
    cached_blocks: int
    threshold: int
    min_tokens: int
    kinds: tuple[Kind, ...]
    dcp: int
    surplus: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Prompts related to what is held in all the ways that clients, templates and tokenisers bring about."""
    size = draw(st.integers(1, LONGEST))
    alphabet = draw(st.sampled_from([1, 2, 50_000]))
    dice = random.Random(draw(st.integers(0, 2**16)))
    held = [dice.randrange(alphabet) for _ in range(size)]
    more = [dice.randrange(alphabet) for _ in range(draw(st.integers(1, 150)))]
    place = draw(st.integers(0, size - 1))
    prompt = draw(
        st.sampled_from(
            [
                held,
                held[: place + 1],
                held + more,
                [*held[:place], held[place] + 1, *held[place + 1 :], *more],
                held[:place] + more,
                held[:place] + held[place + 1 :] + more,
                held[:place] + more + held[place:],
                held[1:] + more,
                more[:1] + held,
                held[:1],
                more,
            ]
        )
    )
    covered = draw(st.one_of(st.just(size), st.integers(0, size)))
    block_sizes = st.sampled_from([1, 2, 8, 16, 48, 64, 128])
    decode_blocks = draw(block_sizes)
    kinds = draw(
        st.sampled_from(
            [(Kind.FULL,)] * 3
            + [(Kind.FULL, Kind.WINDOW), (Kind.WINDOW, Kind.FULL), (Kind.FULL, Kind.STATE), (Kind.WINDOW,)]
        )
    )
    # What cannot be told from outside does not happen here: that a model with nothing but a sliding window
    # lists blocks beyond the tokens it tells of, or that a state is that of more tokens.
    window_only = kinds == (Kind.WINDOW,)
    surplus = draw(st.sampled_from([0, -1] if window_only else [0, 0, 0, 1, 3, -1, -2]))
    said = draw(st.one_of(st.just(covered), st.just(size), st.integers(0, size + 40)))
    return Case(
        held=held,
        covered=covered,
        said=max(said, size) if window_only or Kind.STATE in kinds else said,
        prompt=prompt,
        decode_blocks=decode_blocks,
        prefill_blocks=draw(st.one_of(st.just(decode_blocks), block_sizes)),
        cached_blocks=draw(st.one_of(st.just(0), st.integers(0, 20))),
        threshold=draw(st.sampled_from([0, 16, 64])),
        min_tokens=draw(st.sampled_from([0, 1, 16, 64])),
        kinds=kinds,
        dcp=draw(st.sampled_from([1, 1, 1, 2])),
        surplus=surplus,
    )


Decide = Callable[[Record, list[int], Worker, Worker, Conditions], Reuse | NoReuse]


def turn(case: Case, decided_by: Decide) -> tuple[Reuse | NoReuse, Computed | None]:
    """What was decided, and what the engine made of it. Raises ``EngineFails``."""
    decode = Decode.retaining(
        case.held,
        said_tokens=case.said,
        block_size=case.decode_blocks,
        kinds=case.kinds,
        dcp=case.dcp,
        surplus=case.surplus,
    )
    record = Record(
        worker="http://d",
        generation="g1",
        params=msgspec.json.encode(decode.params),
        fingerprint=fingerprint(case.held[: case.covered], SCOPE),
        model="m",
        stored_at=0.0,
        deadline=100.0,
        turn=1,
    )
    holder = Worker("http://d", Role.DECODE, capabilities=Capabilities("g1", block_size=case.decode_blocks))
    prefill = Worker("http://p", Role.PREFILL, capabilities=Capabilities("p1", block_size=case.prefill_blocks))
    decision = decided_by(record, case.prompt, holder, prefill, Conditions(1.0, SCOPE, case.min_tokens))
    if isinstance(decision, NoReuse):
        return decision, None
    engine = Prefill(case.prefill_blocks, case.cached_blocks, case.threshold)
    return decision, engine.run(case.prompt, sent(decision.params), decode)


def sent(params: Members) -> dict[str, Any]:
    """As the engine reads them."""
    decoded = msgspec.json.decode(msgspec.json.encode(params))
    assert isinstance(decoded, dict)
    return decoded


def plain(**changes: Any) -> Case:
    """The usual turn: the whole history came back, and some more."""
    held = [index * 7 % 1000 for index in range(100)]
    usual: dict[str, Any] = {
        "held": held,
        "covered": 100,
        "said": 100,
        "prompt": [*held, 1, 2, 3],
        "decode_blocks": 16,
        "prefill_blocks": 16,
        "cached_blocks": 0,
        "threshold": 0,
        "min_tokens": 0,
        "kinds": (Kind.FULL,),
        "dcp": 1,
        "surplus": 0,
    }
    return Case(**usual | changes)


@settings(max_examples=1000)
@given(cases())
@example(plain())
@example(plain(surplus=1))
@example(plain(surplus=-1))
@example(plain(prompt=[index * 7 % 1000 for index in range(100)]))
@example(plain(prompt=[index * 7 % 1000 for index in range(50)] + [5] * 80))
@example(plain(kinds=(Kind.FULL, Kind.WINDOW), surplus=1))
@example(plain(kinds=(Kind.FULL, Kind.WINDOW), surplus=-1))
@example(plain(kinds=(Kind.FULL, Kind.STATE), prompt=[index * 7 % 1000 for index in range(100)]))
@example(plain(dcp=2, surplus=-1))
@example(plain(dcp=2, cached_blocks=1, kinds=(Kind.FULL, Kind.WINDOW)))
@example(plain(decode_blocks=8))
def test_engine_takes_only_equal_tokens_as_computed(case: Case) -> None:
    decision, computed = turn(case, decide)
    if not isinstance(decision, Reuse) or computed is None:
        return
    assert computed.wrong == []
    assert computed.tokens < len(case.prompt)
    assert case.held[: decision.tokens] == case.prompt[: decision.tokens]
    assert 0 < decision.tokens < len(case.prompt)
    assert decision.tokens >= case.min_tokens
    assert (decision.outcome is Outcome.HIT) == (decision.tokens == case.said)


@pytest.mark.parametrize("size", [1, 16, 17, 100, 128, 129])
@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 128])
def test_history_that_came_back_whole_is_reused_whole(size: int, block_size: int) -> None:
    held = list(range(size))
    case = plain(
        held=held, covered=size, said=size, prompt=[*held, 9], decode_blocks=block_size, prefill_blocks=block_size
    )
    decision, computed = turn(case, decide)
    assert isinstance(decision, Reuse)
    assert (decision.outcome, decision.tokens) == (Outcome.HIT, size)
    assert computed == Computed(tokens=size, wrong=[], from_remote=size)


@pytest.mark.parametrize("kinds", [(Kind.FULL, Kind.WINDOW), (Kind.FULL, Kind.STATE)])
def test_several_kv_groups_are_reused_when_all_came_back(kinds: tuple[Kind, ...]) -> None:
    decision, computed = turn(plain(kinds=kinds), decide)
    assert isinstance(decision, Reuse)
    assert decision.outcome is Outcome.HIT
    assert computed == Computed(tokens=100, wrong=[], from_remote=100)


def test_spread_context_is_reused_when_all_came_back() -> None:
    decision, computed = turn(plain(dcp=2), decide)
    assert isinstance(decision, Reuse)
    assert computed == Computed(tokens=100, wrong=[], from_remote=100)


@settings(max_examples=300)
@given(cases())
def test_equal_beginning_is_reused_to_within_a_step(case: Case) -> None:
    """Not only never wrong: what is equal is not given away either."""
    case = Case(**{**vars(case), "kinds": (Kind.FULL,), "dcp": 1, "surplus": 0, "min_tokens": 0, "covered": case.said})
    case = Case(**{**vars(case), "prefill_blocks": case.decode_blocks, "said": min(case.said, len(case.held))})
    case = Case(**{**vars(case), "covered": case.said})
    held = case.held[: case.said]
    common = next((i for i, (a, b) in enumerate(zip(held, case.prompt, strict=False)) if a != b), None)
    common = min(len(held), len(case.prompt)) if common is None else common
    decision, _ = turn(case, decide)
    reused = decision.tokens if isinstance(decision, Reuse) else 0
    assert common - 16 < reused <= common or reused == len(case.prompt) - 1 == common - 1


# --- careless versions of ``decide``: the same check must catch each ----------------------------------


def _with(decision: Reuse | NoReuse, **members: msgspec.Raw) -> Reuse | NoReuse:
    if isinstance(decision, NoReuse):
        return decision
    return Reuse(decision.outcome, decision.reason, decision.tokens, decision.params | members)


def _raw_member(record: Record, name: str) -> msgspec.Raw:
    return msgspec.json.decode(record.params, type=dict[str, msgspec.Raw])[name]


def does_not_trim_the_list(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    decision = decide(record, prompt, d, p, c)
    return _with(decision, remote_block_ids=_raw_member(record, "remote_block_ids"))


def trims_without_saying_so(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    decision = decide(record, prompt, d, p, c)
    return _with(decision, remote_num_tokens=_raw_member(record, "remote_num_tokens"))


def does_not_verify(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    params = KvParams(record.params)
    return Reuse(Outcome.HIT, Reason.ALL_HELD, params.tokens, params.whole())


def compares_lengths_only(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    forged = msgspec.structs.replace(record, fingerprint=fingerprint(prompt[: record.fingerprint.tokens], SCOPE))
    return decide(forged, prompt, d, p, c)


def trusts_any_block_size(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    return decide(record, prompt, d, Worker(p.url, p.role, capabilities=d.capabilities), c)


def cuts_every_kind_of_group(record: Record, prompt: list[int], d: Worker, p: Worker, c: Conditions) -> Reuse | NoReuse:
    """Takes the first group for the only one to decide, then cuts all."""
    params = msgspec.json.decode(record.params)
    lists = params["remote_block_ids"]
    one = msgspec.json.encode(params | {"remote_block_ids": lists[:1], "dcp_size": 1})
    decision = decide(msgspec.structs.replace(record, params=one), prompt, d, p, c)
    if isinstance(decision, NoReuse):
        return decision
    blocks = len(sent(decision.params)["remote_block_ids"][0])
    return _with(decision, remote_block_ids=msgspec.Raw(msgspec.json.encode([ids[:blocks] for ids in lists])))


def is_wrong(case: Case, decided_by: Decide) -> bool:
    """Whether this turn ends with a wrong answer and status 200."""
    try:
        _, computed = turn(case, decided_by)
    except EngineFails:
        return False
    return computed is not None and bool(computed.wrong)


@pytest.mark.parametrize(
    "careless",
    [
        does_not_trim_the_list,
        trims_without_saying_so,
        does_not_verify,
        compares_lengths_only,
        trusts_any_block_size,
        cuts_every_kind_of_group,
    ],
)
def test_model_of_the_engine_catches_a_careless_router(careless: Decide) -> None:
    quick = settings(max_examples=5000, phases=[Phase.generate], database=None, derandomize=True)
    caught = find(cases(), lambda case: is_wrong(case, careless), settings=quick)
    assert not is_wrong(caught, decide)
