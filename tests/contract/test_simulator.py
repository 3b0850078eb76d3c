"""The simulator behaves as vLLM's source says, above all where vLLM does wrong in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.simulator import EOS, Clock, Cluster, SimEngine, decode, encode

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
NOTHING_RETAINED: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LONG = "Once there was a river and a mountain, and between them a garden. " * 12


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(clock=Clock(frozen=True)) as cluster:
        yield cluster


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Pair:
    """The protocol, spoken by hand: one prefill and one decode worker, no router."""

    def __init__(self, http: aiohttp.ClientSession, prefill: SimEngine, decode: SimEngine) -> None:
        self.http, self.prefill, self.decode = http, prefill, decode

    async def post(self, engine: SimEngine, body: Json, path: str = CHAT) -> tuple[int, Json]:
        async with self.http.post(engine.url + path, json=body) as response:
            return response.status, await response.json()

    async def leg_one(self, body: Json, kv: Json | None = None) -> tuple[int, Json]:
        """The prefill leg, with what decode retained for it."""
        params = {**kv, "do_remote_decode": True, "do_remote_prefill": False} if kv else NOTHING_RETAINED
        return await self.post(self.prefill, {**body, "max_tokens": 1, "kv_transfer_params": params})

    async def leg_two(self, body: Json, kv: Json) -> tuple[int, Json]:
        return await self.post(self.decode, {**body, "return_token_ids": True, "kv_transfer_params": kv})

    async def turn(self, body: Json, kv: Json | None = None) -> Json:
        status, first = await self.leg_one(body, kv)
        assert status == 200, first
        status, answer = await self.leg_two(body, first["kv_transfer_params"])
        assert status == 200, answer
        return answer

    async def ids(self, body: Json) -> list[int]:
        _, answer = await self.post(self.decode, body, f"{CHAT}/render")
        ids: list[int] = answer["token_ids"]
        return ids


async def pair(cluster: Cluster, http: aiohttp.ClientSession, **options: Any) -> Pair:
    options = {"kv_recompute_threshold": 1, **options}
    return Pair(http, await cluster.start("p", **options), await cluster.start("d", **options))


def ask(*contents: str, **more: Any) -> Json:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, "temperature": 0, "max_tokens": 60, **more}


def held_ids(answer: Json) -> list[int]:
    """The tokens that decode holds after an answer."""
    ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]][:-1]
    assert len(ids) == answer["kv_transfer_params"]["remote_num_tokens"]
    return ids


def verified(answer: Json, prompt: list[int], block_size: int) -> Json:
    """Parameters cut to what decode holds *and* the prompt begins with."""
    common = 0
    for ours, theirs in zip(held_ids(answer), prompt, strict=False):
        if ours != theirs:
            break
        common += 1
    kv: Json = answer["kv_transfer_params"]
    blocks = -(-common // block_size)
    return {
        **kv,
        "remote_num_tokens": common,
        "remote_block_ids": [group[:blocks] for group in kv["remote_block_ids"]],
    }


def said(answer: Json) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def right(engine: SimEngine, body: Json) -> list[int]:
    """The token ids of the answer of a cold prefill."""
    ids: list[int] = (await engine.cold_answer(body))["choices"][0]["token_ids"]
    return ids


def tokens(answer: Json) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


# --- tokens and text ------------------------------------------------------------------------------


def test_text_comes_back_and_tokens_may_not() -> None:
    text = "Perhaps river café 漢字 <think>"
    assert decode(encode(text), skip_special=False) == text
    halves = [*encode(" riv"), *encode("er")]
    assert decode(halves) == " river"
    assert encode(decode(halves)) != halves


@pytest.mark.parametrize("wish", ["", "[think]"])
async def test_an_answer_sent_back_is_a_prefix_unless_it_is_spelt_otherwise(
    cluster: Cluster, http: aiohttp.ClientSession, wish: str
) -> None:
    it = await pair(cluster, http)
    answer = await it.turn(ask(f"Hello {wish}"))
    prompt = await it.ids(ask(f"Hello {wish}", said(answer), "And then?"))
    held = held_ids(answer)
    # Reasoning is not sent back, so its turn diverges where it began.
    assert (prompt[: len(held)] == held) is (wish == "")


async def test_reasoning_pasted_into_history_is_dropped(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    kept = await it.ids(ask("Hello", "Garden", "And?"))
    assert await it.ids(ask(" Hello\n", "<think>Perhaps.</think>\n\nGarden ", "And?")) == kept


# --- right use --------------------------------------------------------------------------------------


async def test_two_legs_give_the_cold_answer(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    body = ask(LONG)
    answer = await it.turn(body)
    assert tokens(answer) == await right(it.decode, body)
    assert it.decode.core.pulled_tokens == len(answer["prompt_token_ids"])
    assert it.decode.core.computed_tokens == 1
    assert not it.prefill.held()
    assert [kept.num_tokens for kept in it.decode.retained] == [len(held_ids(answer))]
    assert not cluster.hazards


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("wish", ["", "[halves]", "[think]"])
async def test_verified_reuse_gives_the_cold_answer_over_many_turns(
    cluster: Cluster, http: aiohttp.ClientSession, block_size: int, prefix_caching: bool, wish: str
) -> None:
    it = await pair(cluster, http, block_size=block_size, prefix_caching=prefix_caching)
    contents = [LONG + wish]
    kv: Json | None = None
    for turn in range(5):
        body = ask(*contents)
        answer = await it.turn(body, kv)
        assert tokens(answer) == await right(it.decode, body)
        contents += [said(answer), f"Turn {turn} {wish} " + LONG[: 90 * turn]]
        kv = verified(answer, await it.ids(ask(*contents)), block_size)
        assert kv["remote_num_tokens"] > 0
    assert not cluster.hazards
    assert len(it.decode.retained) == 1
    assert (it.prefill.core.pulled_tokens > 0) or prefix_caching


async def test_an_adapter_has_its_own_kv(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, adapters=("tuned",))
    answer = await it.turn(ask(LONG))
    tuned = ask(LONG, said(answer), "Go on", model="tuned")
    assert await right(it.decode, tuned) != await right(it.decode, {**tuned, "model": "sim-model"})
    wrong = await it.turn(tuned, verified(answer, await it.ids(tuned), 16))
    assert tokens(wrong) != await right(it.decode, tuned)


async def test_decode_context_parallelism_reads_from_the_heads(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, dcp_size=2, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    kv = answer["kv_transfer_params"]
    assert (kv["dcp_size"], len(kv["remote_block_ids"][0])) == (2, -(-len(held_ids(answer)) // 32))
    body = ask(LONG, said(answer), "Go on")
    assert tokens(await it.turn(body, kv)) == await right(it.decode, body)


async def test_sampling_and_choices_are_drawn_from_the_cache(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e")
    it = Pair(http, engine, engine)
    answers = [
        (await it.post(engine, ask(LONG, temperature=1, seed=seed, return_token_ids=True)))[1] for seed in (1, 1, 2)
    ]
    assert tokens(answers[0]) == tokens(answers[1]) != tokens(answers[2])
    _, several = await it.post(engine, ask(LONG, n=3, logprobs=True, top_logprobs=2))
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert all(len(one["top_logprobs"]) == 2 for one in several["choices"][0]["logprobs"]["content"])


async def test_several_choices_share_what_can_be_read_once(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    _, first = await it.leg_one(ask(LONG))
    status, _ = await it.leg_two(ask(LONG, n=2), first["kv_transfer_params"])
    assert status == 200
    assert "stale-read" in cluster.kinds()
    assert len(it.decode.retained) == 2


async def test_lost_parameters_are_noticed(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    _, first = await it.leg_one(ask(LONG))
    kv = first["kv_transfer_params"]
    del kv["transfer_mode"], kv["sim_opaque"]
    await it.leg_two(ask(LONG), kv)
    assert [hazard.detail for hazard in cluster.hazards] == ["sim_opaque, transfer_mode"]


async def test_reuse_spares_prefill_what_decode_holds(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    before = it.prefill.core.computed_tokens
    body = ask(LONG, said(answer), "Go on")
    prompt = await it.ids(body)
    await it.turn(body, verified(answer, prompt, 16))
    assert it.prefill.core.computed_tokens - before == len(prompt) - len(held_ids(answer))


async def test_everything_claimed_still_computes_the_last_token(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    body = ask(LONG)
    answer = await it.turn(body)
    kv = verified(answer, answer["prompt_token_ids"], 16)
    assert kv["remote_num_tokens"] == len(answer["prompt_token_ids"])
    before = it.prefill.core.computed_tokens
    again = await it.turn(body, kv)
    assert it.prefill.core.computed_tokens - before == 1
    assert tokens(again) == tokens(answer)
    assert not cluster.hazards


async def test_a_tool_call_and_its_result_go_on_from_the_same_tokens(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {}}}}}]
    body = ask("[tool] please", tools=tools)
    answer = await it.turn(body)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert list(json.loads(call["function"]["arguments"])) == ["at"]
    messages = [*body["messages"], choice["message"], {"role": "tool", "content": "seen"}]
    prompt = await it.ids({**body, "messages": messages})
    assert verified(answer, prompt, 16)["remote_num_tokens"] == len(held_ids(answer))


# --- wrong use: status 200 and wrong text ----------------------------------------------------------------


async def test_naive_reuse_of_a_respelt_answer_is_wrong_with_200(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    answer = await it.turn(ask(f"{LONG} [halves]"))
    body = ask(f"{LONG} [halves]", said(answer), "Go on " + LONG)
    wrong = await it.turn(body, answer["kv_transfer_params"])
    assert tokens(wrong) != await right(it.decode, body)
    assert "wrong-kv" in cluster.kinds()


async def test_naive_reuse_of_an_edited_history_is_wrong_with_200(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    body = ask(LONG.replace("river", "mirror", 1), said(answer), "Go on")
    wrong = await it.turn(body, answer["kv_transfer_params"])
    assert tokens(wrong) != await right(it.decode, body)
    assert "wrong-kv" in cluster.kinds()


async def test_a_number_cut_without_its_block_list_is_wrong(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG, ignore_eos=True))
    body = ask(LONG, "Something else", "Go on")
    kv = verified(answer, await it.ids(body), 16)
    untrimmed = {**kv, "remote_block_ids": answer["kv_transfer_params"]["remote_block_ids"]}
    assert len(kv["remote_block_ids"][0]) < len(untrimmed["remote_block_ids"][0])
    assert tokens(await it.turn(body, untrimmed)) != await right(it.decode, body)
    assert "wrong-kv" in cluster.kinds()


async def test_one_wrong_block_anywhere_changes_the_answer(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    body = ask(LONG, said(answer), "Go on")
    kv = verified(answer, await it.ids(body), 16)
    [blocks] = kv["remote_block_ids"]
    kv["remote_block_ids"] = [[blocks[1], *blocks[1:]]]
    assert tokens(await it.turn(body, kv)) != await right(it.decode, body)


async def test_a_list_cut_too_short_takes_the_engine_down(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    kv = verified(answer, await it.ids(ask(LONG, said(answer), "Go on")), 16)
    kv["remote_block_ids"] = [group[:-1] for group in kv["remote_block_ids"]]
    status, error = await it.leg_one(ask(LONG, said(answer), "Go on"), kv)
    assert (status, error["error"]["type"]) == (500, "InternalServerError")
    async with http.get(f"{it.prefill.url}/health") as response:
        assert response.status == 503
    assert cluster.kinds() == {"crash"}


async def test_careless_reuse_poisons_the_prefix_cache_for_others(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http)
    answer = await it.turn(ask(LONG))
    body = ask(LONG.replace("river", "mirror", 1), said(answer), "Go on")
    await it.turn(body, answer["kv_transfer_params"])
    cluster.hazards.clear()
    alone = {**body, "return_token_ids": True}
    _, plain = await it.post(it.prefill, alone)
    assert tokens(plain) != await right(it.prefill, body)
    assert [hazard.detail[:6] for hazard in cluster.hazards] == ["cached"]
    _, control = await it.post(it.prefill, {**ask("Other " + LONG), "return_token_ids": True})
    assert tokens(control) == await right(it.prefill, ask("Other " + LONG))


async def test_equal_placeholders_do_not_mean_equal_pictures(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    def picture(url: str) -> list[Json]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": LONG}]

    it = await pair(cluster, http, prefix_caching=False)
    one, other = ask(LONG), ask(LONG)
    one["messages"][0]["content"], other["messages"][0]["content"] = picture("a"), picture("b")
    answer = await it.turn(one)
    assert await it.ids(other) == answer["prompt_token_ids"]
    wrong = await it.turn(other, verified(answer, await it.ids(other), 16))
    assert tokens(wrong) != await right(it.decode, other)


async def test_a_part_of_several_groups_cannot_be_cut_out(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, num_groups=2, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    assert tokens(answer) == await right(it.decode, ask(LONG))
    lists = answer["kv_transfer_params"]["remote_block_ids"]
    assert len(lists) == 2
    assert len(lists[1]) < len(lists[0])
    body = ask(LONG, said(answer), "Go on")
    whole = await it.turn(body, answer["kv_transfer_params"])
    assert tokens(whole) == await right(it.decode, body)
    assert not cluster.hazards
    edited = ask(LONG + " Really.", said(answer), "Go on")
    part = verified(whole, await it.ids(edited), 16)
    assert tokens(await it.turn(edited, part)) != await right(it.decode, edited)


# --- reading, releasing, expiring ---------------------------------------------------------------------


async def test_a_retained_turn_can_be_read_once(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    answer = await it.turn(ask(LONG))
    body = ask(LONG, said(answer), "Go on")
    kv = verified(answer, await it.ids(body), 16)
    status, _ = await it.leg_one(body, kv)
    assert status == 200
    assert not it.decode.held()
    status, _ = await it.leg_one(body, kv)
    assert status == 200  # as in the real engine: it reads whatever lies there
    assert cluster.kinds() == {"stale-read", "wrong-kv", "late-notification"}


async def test_an_engine_may_refuse_reads_of_what_is_not_retained(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http, prefix_caching=False, refuses_unknown_reads=True)
    answer = await it.turn(ask(LONG))
    kv = answer["kv_transfer_params"]
    assert (await it.leg_one(ask(LONG), kv))[0] == 200
    assert (await it.leg_one(ask(LONG), kv))[0] == 500


@pytest.mark.parametrize(("waited", "status"), [(474, 200), (476, 500), (481, 500)])
async def test_a_read_is_declined_shortly_before_expiry(
    cluster: Cluster, http: aiohttp.ClientSession, waited: float, status: int
) -> None:
    it = await pair(cluster, http)
    answer = await it.turn(ask(LONG))
    cluster.clock.advance(waited)
    body = ask(LONG, said(answer), "Go on")
    kv = verified(answer, await it.ids(body), 16)
    got, error = await it.leg_one(body, kv)
    assert got == status
    if status == 500:
        assert error["error"] == {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert not it.prefill.held()
        assert bool(it.decode.retained) is (waited < 480)
        assert (await it.leg_one(body))[0] == 200


async def test_versions_without_the_check_read_what_lies_there(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False, expiry_check=False)
    answer = await it.turn(ask(LONG))
    body = ask(LONG, said(answer), "Go on")
    kv = verified(answer, await it.ids(body), 16)
    cluster.clock.advance(481)
    status, first = await it.leg_one(body, kv)
    assert status == 200
    _, wrong = await it.leg_two(body, first["kv_transfer_params"])
    assert tokens(wrong) != await right(it.decode, body)
    assert "stale-read" in cluster.kinds()


async def test_the_ttl_frees_what_nobody_reads(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    await it.turn(ask(LONG))
    cluster.clock.advance(479)
    assert it.decode.held().retained
    cluster.clock.advance(2)
    assert not it.decode.held()


async def test_prefill_keeps_its_blocks_for_the_lease_only(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, prefix_caching=False)
    _, first = await it.leg_one(ask(LONG))
    assert first["kv_transfer_params"]["remote_blocks_expiry_time"] is None
    cluster.clock.advance(29)
    assert it.prefill.held().leased
    cluster.clock.advance(2)
    assert not it.prefill.held()
    status, answer = await it.leg_two(ask(LONG), first["kv_transfer_params"])
    assert status == 200  # nobody checks
    assert tokens(answer) != await right(it.decode, ask(LONG))


async def test_a_queued_decode_renews_the_lease(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, num_blocks=40)
    await it.turn(ask(LONG))
    _, first = await it.leg_one(ask("Another " + LONG))
    second = asyncio.create_task(it.leg_two(ask("Another " + LONG), first["kv_transfer_params"]))
    await until(lambda: bool(it.decode.core.waiting))
    cluster.clock.advance(300)
    assert it.prefill.held().leased
    cluster.clock.advance(181)  # the first turn's TTL: there is room now
    status, answer = await second
    assert (status, tokens(answer)) == (200, await right(it.decode, ask("Another " + LONG)))
    assert not it.prefill.held()
    assert not cluster.hazards


async def test_below_the_threshold_prefill_computes_and_decode_still_frees(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http, kv_recompute_threshold=64)
    answer = await it.turn(ask("Hi [short]"))
    body = ask("Hi [short]", said(answer), "Go on")
    kv = verified(answer, await it.ids(body), 16)
    assert 0 < kv["remote_num_tokens"] < 64
    status, _ = await it.leg_one(body, kv)
    assert status == 200
    assert it.prefill.core.pulled_tokens == 0
    assert not it.decode.held()


async def test_a_full_local_hit_still_tells_decode(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, decoder_kv_blocks_ttl=480)
    answer = await it.turn(ask(LONG))
    kv = verified(answer, answer["prompt_token_ids"][:32], 16)
    before = it.prefill.core.pulled_tokens
    status, _ = await it.leg_one(ask(LONG), kv)
    assert (status, it.prefill.core.pulled_tokens) == (200, before)
    assert not it.decode.held()


@pytest.mark.parametrize(("lists", "freed"), [([[]], True), ([], False)])
async def test_a_request_for_nothing_gives_retained_blocks_back(
    cluster: Cluster, http: aiohttp.ClientSession, lists: list[list[int]], freed: bool
) -> None:
    it = await pair(cluster, http)
    answer = await it.turn(ask(LONG))
    kv = {**answer["kv_transfer_params"], "remote_num_tokens": 0, "remote_block_ids": lists}
    status, _ = await it.leg_one(ask("x"), kv)
    assert status == 200
    assert it.prefill.requests[-1].is_release is freed
    assert (not it.decode.held()) is freed


async def test_a_restarted_decode_worker_is_another_engine(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, expiry_check=False)
    answer = await it.turn(ask(LONG))
    before = it.decode.engine_id, it.decode.start_time, it.decode.url
    await it.decode.restart()
    assert it.decode.engine_id != before[0]
    assert it.decode.start_time > before[1]
    assert it.decode.url == before[2]
    assert not it.decode.held()
    body = ask(LONG, said(answer), "Go on")
    status, _ = await it.leg_one(body, verified(answer, await it.ids(body), 16))
    assert status == 500
    assert (await it.leg_one(body))[0] == 200


async def test_only_turns_that_ended_in_the_engine_are_retained(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    whole = await it.turn(ask(LONG))
    assert tokens(whole)[-1] == EOS
    cut = await it.turn(ask(LONG, max_tokens=3))
    assert cut["choices"][0]["finish_reason"] == "length"
    assert len(it.decode.retained) == 2
    word = said(whole).split()[2]
    stopped = await it.turn(ask(LONG, stop=word))
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == word
    assert word not in said(stopped)
    assert stopped["kv_transfer_params"] is None
    assert len(it.decode.retained) == 2
    assert not it.decode.held().running
    status, plain = await it.post(it.decode, ask(LONG))
    assert (status, plain["kv_transfer_params"]) == (200, None)
    assert len(it.decode.retained) == 2


async def test_parameters_with_neither_direction_are_never_freed(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    neither = {"do_remote_decode": False, "do_remote_prefill": False}
    await it.post(it.decode, ask(LONG, kv_transfer_params=neither))
    cluster.clock.advance(10_000)
    assert it.decode.held().retained
    assert cluster.kinds() == {"never-freed"}


# --- the queue --------------------------------------------------------------------------------------------


async def until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_retained_turns_make_new_ones_wait_until_one_is_given_back(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    it = await pair(cluster, http, num_blocks=40)
    answer = await it.turn(ask(LONG))
    other = ask("Another " + LONG)
    _, first = await it.leg_one(other)
    waiting = asyncio.create_task(it.leg_two(other, first["kv_transfer_params"]))
    await until(lambda: bool(it.decode.core.waiting))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    async with http.get(f"{it.decode.url}/metrics") as response:
        assert 'vllm:num_requests_waiting{engine="0",model_name="sim-model"} 1.0' in await response.text()
    release = {**answer["kv_transfer_params"], "remote_num_tokens": 0, "remote_block_ids": [[]]}
    await it.leg_one(ask("x"), release)
    status, answer = await waiting
    assert (status, tokens(answer)) == (200, await right(it.decode, other))


async def test_hanging_up_frees_everything_at_once(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    it.decode.pause_stream = asyncio.Event()
    _, first = await it.leg_one(ask(f"{LONG} [long]"))
    body = ask(f"{LONG} [long]", stream=True, max_tokens=1000)
    async with http.post(
        it.decode.url + CHAT, json={**body, "kv_transfer_params": first["kv_transfer_params"]}
    ) as response:
        it.decode.pause_stream.set()
        assert (await anext(events(response))).startswith("{")
        assert it.decode.held().running
        response.close()
    await it.decode.settle()
    assert not it.decode.held()
    assert it.decode.requests[-1].aborted


async def test_a_decode_leg_given_up_in_the_queue_frees_prefill(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, num_blocks=40)
    await it.turn(ask(LONG))
    other = ask("Another " + LONG)
    _, first = await it.leg_one(other)
    waiting = asyncio.create_task(it.leg_two(other, first["kv_transfer_params"]))
    await until(lambda: bool(it.decode.core.waiting))
    assert it.prefill.held().leased
    waiting.cancel()
    await until(lambda: not it.prefill.held())
    await it.decode.settle()
    assert not it.decode.held().running


async def test_a_refused_decode_leg_frees_prefill(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    _, first = await it.leg_one(ask(LONG))
    status, error = await it.leg_two(ask(LONG, min_tokens=99), first["kv_transfer_params"])
    assert (status, error["error"]["type"]) == (400, "BadRequestError")
    assert not it.prefill.held()


async def test_too_little_memory_to_go_on_means_starting_anew(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e", num_blocks=12, prefix_caching=False)
    bodies = [ask(f"Number {i} [long]", max_tokens=100, return_token_ids=True) for i in range(2)]
    it = Pair(http, engine, engine)
    answers = await asyncio.gather(*(it.post(engine, body) for body in bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert (status, tokens(answer)) == (200, await right(engine, body))
    assert not engine.held()


async def test_blocks_handed_out_again_are_no_longer_cached(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e", num_blocks=40)
    it = Pair(http, engine, engine)
    for start in ("One ", "Two ", "Six ", "One ", "Two "):
        body = ask(start + LONG, return_token_ids=True)
        _, answer = await it.post(engine, body)
        assert tokens(answer) == await right(engine, body)
    assert not cluster.hazards


# --- the API ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carried", [True, False])
async def test_a_stream_says_what_the_whole_answer_says(
    cluster: Cluster, http: aiohttp.ClientSession, carried: bool
) -> None:
    it = await pair(cluster, http, streams_carry_kv_params=carried)
    body = ask(f"{LONG} [think]", stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    _, first = await it.leg_one(ask(f"{LONG} [think]"))
    async with http.post(
        it.decode.url + CHAT, json={**body, "kv_transfer_params": first["kv_transfer_params"]}
    ) as response:
        assert response.content_type == "text/event-stream"
        *chunks, done = [line async for line in events(response)]
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed if chunk["choices"]]
    whole = await it.decode.cold_answer(body)
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert message["reasoning"]
    ids = [i for chunk in parsed for choice in chunk["choices"] for i in choice.get("token_ids") or ()]
    assert ids == tokens(whole)
    assert parsed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [chunk["usage"] for chunk in parsed if chunk.get("usage")] == [whole["usage"]]
    kvs = [chunk["kv_transfer_params"] for chunk in parsed if chunk.get("kv_transfer_params")]
    assert len(kvs) == carried
    assert len(it.decode.retained) == 1


@pytest.mark.parametrize(("room", "reason"), [(100, "tool_calls"), (40, "length")])
async def test_a_streamed_tool_call_adds_up(
    cluster: Cluster, http: aiohttp.ClientSession, room: int, reason: str
) -> None:
    engine = await cluster.start("e")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    body = ask("[tool]", tools=tools, max_tokens=room)
    async with http.post(engine.url + CHAT, json={**body, "stream": True}) as response:
        parsed = [json.loads(line) async for line in events(response) if line != "[DONE]"]
    calls = [call for chunk in parsed for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    [whole] = (await engine.cold_answer(body))["choices"][0]["message"]["tool_calls"]
    assert "".join(call["function"]["arguments"] for call in calls) == whole["function"]["arguments"]
    assert [call["function"]["name"] for call in calls if "id" in call] == ["look"]
    assert parsed[-1]["choices"][0]["finish_reason"] == reason


async def test_given_token_ids_replace_the_messages_of_a_chat(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    knows, ignores = await cluster.start("a"), await cluster.start("b", honours_prompt_token_ids=False)
    it = Pair(http, knows, ignores)
    ids = (await knows.cold_answer(ask(LONG)))["prompt_token_ids"]
    for engine, told in ((knows, ids), (ignores, (await knows.cold_answer(ask("x")))["prompt_token_ids"])):
        body = ask("x", return_token_ids=True, kv_transfer_params={"prompt_token_ids": ids})
        _, answer = await it.post(engine, body)
        assert answer["prompt_token_ids"] == told
    assert not knows.held()
    assert ignores.held()  # for an engine that does not know them they are parameters like others


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (ask("x", stream_options={"include_usage": True}), 400, "stream_options"),
        (ask("x", max_tokens=2, min_tokens=3), 400, None),
        (ask("x", max_tokens=0), 400, "max_tokens"),
        (ask("x", temperature=3), 400, "temperature"),
        (ask("x", n=0), 400, "n"),
        (ask("x", tools=[]), 400, "tools"),
        (ask("x", tool_choice="auto"), 400, "tool_choice"),
        (ask("x", stop=""), 400, None),
        (ask("x", model="other"), 404, "model"),
        (ask("x", conversation_id="c"), 400, "conversation_id"),
        ({"messages": "x"}, 400, "body.messages"),
        ({"messages": [{"content": "x"}]}, 400, "body.messages.0"),
        (ask(LONG * 100), 400, "input_tokens"),
    ],
)
async def test_nonsense_is_refused_in_the_engines_shape(
    cluster: Cluster, http: aiohttp.ClientSession, body: Json, status: int, param: str | None
) -> None:
    engine = await cluster.start("e", forbidden_members=frozenset({"conversation_id"}))
    got, error = await Pair(http, engine, engine).post(engine, body)
    assert got == status
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert (error["error"]["param"], error["error"]["code"]) == (param, status)
    assert ("forbidden-member" in cluster.kinds()) is ("conversation_id" in body)


async def test_tokenize_misses_what_only_a_full_request_says(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e")
    it = Pair(http, engine, engine)
    body = ask(LONG, reasoning_effort="high")
    _, tokenized = await it.post(engine, body, "/tokenize")
    assert tokenized["tokens"] != await it.ids(body)
    assert tokenized["tokens"] == await it.ids(ask(LONG))
    shut = await cluster.start("s", offers_render=False)
    status, error = await it.post(shut, body, f"{CHAT}/render")
    assert (status, error["error"]["type"]) == (403, "PermissionDeniedError")


async def test_text_completions_go_the_same_way(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    body = {"prompt": LONG, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    path = "/v1/completions"
    first = {**body, "max_tokens": 1, "kv_transfer_params": NOTHING_RETAINED}
    _, prefilled = await it.post(it.prefill, first, path)
    _, answer = await it.post(it.decode, {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}, path)
    whole = await it.decode.cold_answer(body, path=path)
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
    assert not cluster.hazards


async def test_metrics_tell_block_size_number_and_usage(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http, block_size=128, num_blocks=11, prefix_caching=False)
    await it.turn(ask(LONG[:40]))
    async with http.get(f"{it.decode.url}/metrics") as response:
        text = await response.text()
    assert 'block_size="128"' in text
    assert 'num_gpu_blocks="11"' in text
    [usage] = [line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
    assert float(usage.split()[-1]) == pytest.approx(0.1)


# --- faults ----------------------------------------------------------------------------------------------------


async def test_ordered_failures_happen_once_and_only_where_they_are_meant(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    engine = await cluster.start("e")
    it = Pair(http, engine, engine)
    engine.fail_next(status=503, when=lambda request: b"unlucky" in request.raw)
    assert (await it.post(engine, ask("lucky")))[0] == 200
    assert (await it.post(engine, ask("unlucky")))[0] == 503
    assert (await it.post(engine, ask("unlucky")))[0] == 200
    assert [request.status for request in engine.requests] == [200, 503, 200]
    assert engine.faults.pending == 0


@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_connections_are_dropped_where_ordered(cluster: Cluster, http: aiohttp.ClientSession, point: Any) -> None:
    it = await pair(cluster, http)
    it.prefill.close_next(point)
    with pytest.raises(aiohttp.ClientError):
        await it.leg_one(ask(LONG))
    await it.prefill.settle()
    # A prompt that was prefilled stays held even if nobody learns of it.
    assert bool(it.prefill.held().leased) is (point != "before_headers")


@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_requests_hang_where_ordered_until_the_client_gives_up(
    cluster: Cluster, http: aiohttp.ClientSession, point: Any
) -> None:
    engine = await cluster.start("e")
    engine.hang_next(point)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await Pair(http, engine, engine).post(engine, ask(LONG))
    await engine.settle()
    assert engine.requests[-1].aborted
    assert not engine.held()


async def test_streams_break_or_err_in_the_middle(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e")
    seen: list[str] = []

    async def stream() -> None:
        seen.clear()
        async with http.post(engine.url + CHAT, json=ask("x [long]", stream=True)) as response:
            async for line in events(response):
                seen.append(line)  # noqa: PERF401  # what came before the break counts

    engine.close_next("mid_stream", events=3)
    with pytest.raises(aiohttp.ClientError):
        await stream()
    assert len(seen) == 3
    engine.error_next(events=2)
    await stream()
    assert "error" in json.loads(seen[2])
    assert seen[3:] == ["[DONE]"]
    await engine.settle()
    assert not engine.held()


async def test_a_failed_load_is_an_event_in_a_stream(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    it = await pair(cluster, http)
    _, first = await it.leg_one(ask(LONG))
    await it.prefill.partition()
    body = ask(LONG, stream=True, kv_transfer_params=first["kv_transfer_params"])
    async with http.post(it.decode.url + CHAT, json=body) as response:
        assert response.status == 200
        seen = [line async for line in events(response)]
    assert json.loads(seen[0])["error"]["code"] == 500
    assert seen[1:] == ["[DONE]"]
    with pytest.raises(aiohttp.ClientConnectorError):
        await it.leg_one(ask(LONG))
    await it.prefill.heal()
    assert it.prefill.held().leased
    assert (await it.leg_two(ask(LONG), first["kv_transfer_params"]))[0] == 200


async def test_each_event_passes_the_gate_alone(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    engine = await cluster.start("e")
    gate = engine.pause_stream = asyncio.Event()
    async with http.post(engine.url + CHAT, json=ask("x", stream=True)) as response:
        stream = events(response)
        for _ in range(3):
            gate.set()
            await asyncio.wait_for(anext(stream), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
