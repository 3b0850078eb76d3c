"""Which worker gets a leg."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker
from router.health import Health
from router.select import (
    BELIEVED_FOR,
    LEG_TOKENS,
    Bound,
    Policy,
    Wish,
    choose,
    held_within,
    is_available,
    least,
    load_at,
    longest_unused,
    not_draining,
    not_tried,
    select,
    two_of,
)
from router.workers import Capabilities, Reported, Role, Worker

POLICIES = get_args(Policy)
BOUND = Bound(factor=1.5, slack=10_000)
NOBODY = Wish()


def up() -> Health:
    health = Health()
    health.good()
    return health


def down() -> Health:
    health = Health()
    health.bad()
    return health


def opened() -> Breaker:
    breaker = Breaker(failures=1, seconds=10.0)
    breaker.failed(0.0)
    return breaker


def workers(count: int = 3) -> list[Worker]:
    return [Worker(f"http://w{number}", Role.DECODE, health=up()) for number in range(count)]


class Choosing:
    """Chooses as the pool does."""

    def __init__(self, policy: Policy, pool: list[Worker], seed: int = 0) -> None:
        self.policy, self.pool, self.chance, self.count = policy, pool, Random(seed), 0

    def __call__(self, wish: Wish = NOBODY, now: float = 0.0, bound: Bound = BOUND) -> Worker:
        chosen = select(self.policy, self.pool, wish, bound, now, self.chance)
        assert chosen is not None
        self.count += 1
        chosen.last_chosen = self.count
        return chosen


# --- rules


def test_no_worker_is_no_choice() -> None:
    assert choose([], [is_available(0)], [longest_unused]) is None
    for policy in POLICIES:
        assert select(policy, [], Wish("http://w0", ("http://w1",)), BOUND, 0, Random(0)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_worker_is_chosen_whatever_is_known_of_it(policy: Policy) -> None:
    (only,) = pool = workers(1)
    only.health, only.breaker, only.draining, only.in_flight_tokens = down(), opened(), True, 10**9
    wish = Wish("http://w7", (only.name,), 10**9)
    assert select(policy, pool, wish, BOUND, 0.0, Random(0)) is only
    assert choose(pool, [not_tried([only.name]), is_available(0.0), not_draining], [longest_unused]) is only


def test_worker_that_is_down_is_left_out() -> None:
    pool = workers()
    pool[1].health = down()
    assert is_available(0)(pool) == [pool[0], pool[2]]


def test_worker_whose_breaker_is_open_is_left_out_until_a_trial_is_due() -> None:
    pool = workers()
    pool[1].breaker = opened()
    assert is_available(9)(pool) == [pool[0], pool[2]]
    assert is_available(10)(pool) == pool
    assert pool[1].breaker.begin(10)
    assert is_available(11)(pool) == [pool[0], pool[2]], "one trial at a time"


def test_worker_that_was_not_probed_yet_is_better_than_one_that_is_down() -> None:
    pool = [Worker("http://w0", Role.DECODE, health=down()), Worker("http://w1", Role.DECODE)]
    assert is_available(0)(pool) == [pool[1]]


def test_worker_that_answers_probes_only_is_better_than_one_that_does_not() -> None:
    pool = [Worker("http://w0", Role.DECODE, health=down()), *workers(1)]
    pool[1].breaker = opened()
    assert is_available(0)(pool) == [pool[1]]


def test_all_are_tried_when_every_probe_fails() -> None:
    """A probe can be wrong; not trying is surely no better."""
    pool = [Worker(f"http://w{number}", Role.DECODE, health=down()) for number in range(2)]
    assert is_available(0)(pool) == pool


def test_worker_that_failed_in_this_turn_is_not_tried_again() -> None:
    pool = workers()
    assert not_tried(["http://w0", "http://w2"])(pool) == [pool[1]]


def test_worker_that_failed_is_tried_again_when_there_is_no_other() -> None:
    pool = workers(1)
    assert not_tried(["http://w0"])(pool) == pool


def test_another_server_is_tried_before_another_rank_of_one_that_failed() -> None:
    ranks = [Worker("http://a", Role.DECODE, rank=rank) for rank in range(2)]
    other = Worker("http://b", Role.DECODE)
    assert not_tried(["http://a#rank=0"])([*ranks, other]) == [other]
    assert not_tried(["http://a#rank=0", "http://b"])([*ranks, other]) == [ranks[1]]


def test_draining_worker_gets_nothing_while_there_is_another() -> None:
    pool = workers(2)
    pool[0].draining = True
    assert not_draining(pool) == [pool[1]]
    pool[1].draining = True
    assert not_draining(pool) == pool


def test_fewest_tokens_legs_included() -> None:
    pool = workers()
    pool[0].in_flight, pool[0].in_flight_tokens = 1, 3 * LEG_TOKENS
    pool[1].in_flight, pool[1].in_flight_tokens = 3, 10
    pool[2].in_flight, pool[2].in_flight_tokens = 2, 10
    assert choose(pool, [], [least(load_at(0))]) is pool[2]


def test_what_others_have_running_counts_while_it_is_news() -> None:
    pool = workers(2)
    pool[0].reported = Reported(read_at=100.0, running=5, waiting=2, kv_usage=0.5, ours=3)
    assert pool[0].reported.others == 4
    assert choose(pool, [], [least(load_at(101.0))]) is pool[1]
    assert load_at(100.0 + BELIEVED_FOR + 1)(pool[0]) == 0


def test_our_own_legs_are_not_counted_twice() -> None:
    pool = workers(1)
    pool[0].in_flight = 3
    pool[0].reported = Reported(read_at=0.0, running=3, waiting=0, kv_usage=None, ours=3)
    assert load_at(0.0)(pool[0]) == 3 * LEG_TOKENS


def test_report_that_is_behind_our_own_count_is_no_negative_load() -> None:
    assert Reported(read_at=0.0, running=0, waiting=0, kv_usage=None, ours=2).others == 0


# --- the holder


def test_holder_is_preferred_to_a_less_loaded_one() -> None:
    pool = workers()
    pool[2].in_flight, pool[2].in_flight_tokens = 3, 9_000
    assert Choosing("cache_aware", pool)(Wish("http://w2")) is pool[2]


def test_holder_past_the_bound_is_not_preferred() -> None:
    pool = workers()
    pool[2].in_flight, pool[2].in_flight_tokens = 3, 11_000
    assert Choosing("cache_aware", pool)(Wish("http://w2")) is not pool[2]


def test_bound_grows_with_the_load_of_the_others() -> None:
    pool = workers()
    for worker in pool:
        worker.in_flight_tokens = 100_000
    pool[2].in_flight_tokens = 159_000
    assert Choosing("cache_aware", pool)(Wish("http://w2")) is pool[2]
    pool[2].in_flight_tokens = 161_000
    assert Choosing("cache_aware", pool)(Wish("http://w2")) is not pool[2]


@pytest.mark.parametrize("state", ["down", "open", "draining", "tried"])
def test_holder_that_may_not_be_chosen_is_not_preferred(state: str) -> None:
    pool = workers()
    tried: tuple[str, ...] = ()
    match state:
        case "down":
            pool[2].health = down()
        case "open":
            pool[2].breaker = opened()
        case "draining":
            pool[2].draining = True
        case "tried":
            tried = ("http://w2",)
    assert Choosing("cache_aware", pool)(Wish("http://w2", tried)) is pool[0]


def test_holder_is_one_rank_of_its_server() -> None:
    ranks = [Worker("http://a", Role.DECODE, health=up(), rank=rank) for rank in range(4)]
    choosing = Choosing("cache_aware", ranks)
    assert {choosing(Wish("http://a#rank=2")).rank for _ in range(10)} == {2}


def test_idle_conversations_never_leave_their_worker() -> None:
    """Turns of a few conversations that overlap a little do not bounce between idle workers."""
    pool = workers()
    choosing = Choosing("cache_aware", pool)
    homes = {number: choosing() for number in range(6)}
    for number in [0, 3, 1, 4, 2, 5] * 5:
        home = homes[number]
        home.in_flight, home.in_flight_tokens = 1, 4_000
        neighbour = homes[(number + 3) % 6]
        assert choosing(Wish(neighbour.name)) is neighbour
        home.in_flight, home.in_flight_tokens = 0, 0


def test_policies_that_do_not_look_at_the_cache_do_not() -> None:
    pool = workers()
    pool[2].in_flight_tokens = 1
    assert Choosing("least_loaded", pool)(Wish("http://w2")) is not pool[2]


# --- fairness


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_equal_workers_take_turns(policy: Policy, count: int) -> None:
    pool = workers(count)
    choosing = Choosing(policy, pool)
    chosen = [choosing().name for _ in range(4 * count)]
    assert chosen == [worker.name for worker in pool] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_when_choices_for_two_roles_alternate(policy: Policy) -> None:
    """One running number for both roles once gave every prefill leg to the same of two workers."""
    prefill, decode = workers(2), workers(2)
    chance, count = Random(1), 0
    for _ in range(100):
        for pool in (prefill, decode):
            chosen = select(policy, pool, NOBODY, BOUND, 0.0, chance)
            assert chosen is not None
            count += 1
            chosen.last_chosen = count
            chosen.in_flight_tokens += 1
    for worker in (*prefill, *decode):
        assert 25 <= worker.in_flight_tokens <= 75


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_fair_when_all_work_is_alike(policy: Policy) -> None:
    pool = workers(4)
    choosing, chance = Choosing(policy, pool), Random(2)
    picks: Counter[str] = Counter()
    running: list[Worker] = []
    for _ in range(4000):
        chosen = choosing()
        picks[chosen.name] += 1
        chosen.in_flight += 1
        chosen.in_flight_tokens += 1000
        running.append(chosen)
        if len(running) > 24:
            done = running.pop(chance.randrange(len(running)))
            done.in_flight -= 1
            done.in_flight_tokens -= 1000
    assert min(picks.values()) > 800
    assert max(picks.values()) < 1200


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fresh_worker_is_not_overrun(policy: Policy) -> None:
    """It gets work until it has as much as the others, and never more at once than they."""
    pool = workers(4)
    fresh = pool.pop()
    choosing, chance = Choosing(policy, pool), Random(3)
    running: list[Worker] = []
    most = 0
    for step in range(3000):
        if step == 1000:
            pool.append(fresh)
        chosen = choosing()
        chosen.in_flight += 1
        chosen.in_flight_tokens += 2000
        running.append(chosen)
        if len(running) > 40:
            done = running.pop(chance.randrange(len(running)))
            done.in_flight -= 1
            done.in_flight_tokens -= 2000
        most = max(most, fresh.in_flight)
    assert fresh.in_flight > 0
    # These two do not look at what is running.
    assert most <= (25 if policy in ("random", "round_robin") else 14)


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "power_of_two"])
@pytest.mark.parametrize("routers", [2, 4, 8])
def test_several_routers_do_not_herd_on_a_fresh_worker(policy: Policy, routers: int) -> None:
    """Each sees its own legs exactly and those of the others in reports that are seconds old."""
    count, running_at_once, chance = 4, 20, Random(4)
    views = [[replace(worker, health=up()) for worker in workers(count)] for _ in range(routers)]
    choosing = [Choosing(policy, view[:-1], seed) for seed, view in enumerate(views)]
    running: list[tuple[int, int]] = []
    most = 0
    for step in range(6000):
        if step == 2000:
            for chooser, view in zip(choosing, views, strict=True):
                chooser.pool = view
        if step % 200 == 0:
            for number in range(count):
                total = sum(view[number].in_flight for view in views)
                for view in views:
                    ours = view[number].in_flight
                    view[number].reported = Reported(0.0, total, 0, None, ours)
        router = chance.randrange(routers)
        chosen = choosing[router]()
        number = next(index for index, worker in enumerate(views[router]) if worker is chosen)
        chosen.in_flight += 1
        chosen.in_flight_tokens += 1000
        running.append((router, number))
        if len(running) > running_at_once * routers:
            router, number = running.pop(chance.randrange(len(running)))
            views[router][number].in_flight -= 1
            views[router][number].in_flight_tokens -= 1000
        most = max(most, sum(view[-1].in_flight for view in views))
    fair = running_at_once * routers / count
    assert most < 3 * fair


@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=8), st.sampled_from(POLICIES), st.randoms())
def test_someone_is_always_chosen_and_only_from_those_there_are(
    loads: list[int], policy: Policy, chance: Random
) -> None:
    pool = workers(len(loads))
    for worker, tokens in zip(pool, loads, strict=True):
        worker.in_flight_tokens = tokens
        worker.health = chance.choice([up, down, Health])()
        worker.draining = chance.random() < 0.3
        worker.breaker = opened() if chance.random() < 0.3 else Breaker()
    tried = tuple(worker.name for worker in pool if chance.random() < 0.3)
    chosen = select(policy, pool, Wish(chance.choice(pool).name, tried), BOUND, 0.0, chance)
    assert chosen is not None
    free = [worker for worker in pool if worker.name not in tried and worker.available(0) and not worker.draining]
    assert not free or chosen in free


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=8), st.integers(0, 7))
def test_holder_is_never_preferred_past_the_bound(loads: list[int], holder: int) -> None:
    pool = workers(len(loads))
    for worker, tokens in zip(pool, loads, strict=True):
        worker.in_flight_tokens = tokens
    name = f"http://w{holder}"
    kept = held_within(name, BOUND, load_at(0))(pool)
    if len(kept) == 1:
        assert kept[0].in_flight_tokens <= min(loads) * BOUND.factor + BOUND.slack
    else:
        assert holder >= len(loads) or loads[holder] > min(loads) * BOUND.factor + BOUND.slack


def test_two_of_are_two() -> None:
    pool = workers(5)
    seen = {worker.name for _ in range(100) for worker in two_of(Random(_))(pool)}
    assert seen == {worker.name for worker in pool}
    assert len(two_of(Random(0))(pool)) == 2
    assert two_of(Random(0))(pool[:2]) == pool[:2]


def full(name: str, usage: float | None) -> Worker:
    """With a cache of 1,600 tokens, so much of it in use."""
    reported = Reported(0.0, running=0, waiting=0, kv_usage=usage, ours=0)
    capabilities = Capabilities("1", block_size=16, num_blocks=100)
    return Worker(name, Role.DECODE, health=up(), capabilities=capabilities, reported=reported)


def test_a_conversation_goes_where_there_is_room_for_it() -> None:
    pool = [full("http://a", 0.95), full("http://b", 0.5), full("http://c", 0.95)]
    for _ in range(5):
        assert Choosing("cache_aware", pool)(Wish(tokens=400)) is pool[1]
    assert Choosing("cache_aware", pool)(Wish("http://c", tokens=400)) is pool[2], "its holder can make room"
    assert Choosing("cache_aware", pool)(Wish(tokens=10_000)) in pool, "none has room: any is as good"


def test_a_worker_that_does_not_tell_how_full_it_is_counts_as_empty() -> None:
    pool = [full("http://a", 0.95), full("http://b", None)]
    assert Choosing("cache_aware", pool)(Wish(tokens=400)) is pool[1]
