"""What one worker can do, found out by asking it. Once per start of the worker."""

from dataclasses import dataclass

import msgspec
import structlog

from proxy.body import dump, raw
from proxy.dialects import DIALECTS, Dialect
from proxy.harvest import Harvest
from proxy.servers import RenderServer, Server
from proxy.token_ids import TokenIds
from proxy.upstream import Answer, Failed, Refused, Upstream
from router.kv_params import Members, first_turn

log = structlog.get_logger()

_QUESTIONS: dict[str, Members] = {
    # Enough roles that a template which treats them differently shows.
    "chat": {
        "messages": raw(
            [
                {"role": "system", "content": "Answer with one word."},
                {"role": "user", "content": "Is 4 even?"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "Is 5?"},
            ]
        )
    },
    "completions": {"prompt": raw("The first ten natural numbers are 1, 2,")},
}


class ProbeFailed(Exception):
    """The worker did not answer what every worker answers; it is asked again later."""


@dataclass(frozen=True)
class Abilities:
    """What was found out by asking. Fields as in ``Capabilities``."""

    renders: frozenset[str]
    tokenizes: frozenset[str]
    honours_ids: frozenset[str]
    render_server: frozenset[str]


async def discover(upstream: Upstream, server: Server, render: str | None, timeout: float) -> Abilities:
    """What ``server`` can do, and whether the render server at ``render`` makes the same prompts.

    Each question within ``timeout`` seconds. Raises ``ProbeFailed``.
    """
    model = await _model(upstream, server, timeout)
    renders, tokenizes, honours, agreed = set(), set(), set(), set()
    for dialect in DIALECTS:
        question = {"model": raw(model), **_QUESTIONS[dialect.name]}
        truth = await _prompt_ids(upstream, server, dialect, question, timeout)
        if truth is None:
            # No such endpoint (a base model has no chat template), or a version that tells no ids.
            continue
        if await _rendered(upstream, server, dialect, question, timeout) == truth:
            renders.add(dialect.name)
        if render is not None and await _agrees(upstream, RenderServer(render), dialect, question, truth, timeout):
            agreed.add(dialect.name)
        if await _tokenized(upstream, server, dialect, question, timeout) == truth:
            tokenizes.add(dialect.name)
        # As a prefill leg, whose few blocks go when its lease ends: an engine that does not know the ids
        # would keep the blocks of parameters without a direction for good.
        members, params = dialect.with_ids(dialect.without_history(question), raw(truth), {})
        if params:
            members["kv_transfer_params"] = msgspec.Raw(dump(first_turn() | params))
        if await _prompt_ids(upstream, server, dialect, members, timeout) == truth:
            honours.add(dialect.name)
    return Abilities(frozenset(renders), frozenset(tokenizes), frozenset(honours), frozenset(agreed))


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


def tokenized_ids(answer: bytes) -> TokenIds:
    """The ids in an answer of ``/tokenize``. Raises ``msgspec.DecodeError``."""
    return TokenIds.read(msgspec.json.decode(answer, type=_Tokenized).tokens)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def served_models(answer: bytes) -> list[str]:
    """The names in an answer of ``/v1/models``. Raises ``msgspec.DecodeError``."""
    return [model.id for model in msgspec.json.decode(answer, type=_Models).data]


async def _model(upstream: Upstream, server: Server, timeout: float) -> str:
    answer = await upstream.get(server, "/v1/models", timeout)
    if not isinstance(answer, Answer):
        raise ProbeFailed(f"/v1/models: {answer}")
    try:
        return served_models(answer.body)[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise ProbeFailed(f"/v1/models names no model: {error}") from error


async def _prompt_ids(
    upstream: Upstream, server: Server, dialect: Dialect, question: Members, timeout: float
) -> list[int] | None:
    """The prompt's ids as the worker tells them with an answer of one token."""
    body = dump(question | {"max_tokens": raw(1), "return_token_ids": raw(True), "temperature": raw(0)})
    answer = _final(await upstream.post(server, dialect.path, body, timeout))
    if answer is None:
        return None
    harvest = Harvest(client_wants_ids=False)
    harvest.take(answer.body)
    return harvest.prompt_tokens


async def _rendered(
    upstream: Upstream, server: Server, dialect: Dialect, question: Members, timeout: float
) -> list[int] | None:
    answer = _final(await upstream.post(server, dialect.render_path, dump(question), timeout))
    try:
        found = dialect.rendered_ids(answer.body) if answer is not None else None
        return None if found is None else found.numbers
    except msgspec.DecodeError:
        return None


async def _agrees(
    upstream: Upstream, render: RenderServer, dialect: Dialect, question: Members, truth: list[int], timeout: float
) -> bool:
    """Whether the render server makes the worker's prompt. If it does not answer, the worker is none the worse."""
    try:
        agrees = await _rendered(upstream, render, dialect, question, timeout) == truth
    except ProbeFailed:
        agrees = False
    if not agrees:
        log.warning(
            "the render server does not make a worker's prompts, or does not answer: the workers are asked instead",
            endpoint=dialect.name,
        )
    return agrees


async def _tokenized(
    upstream: Upstream, server: Server, dialect: Dialect, question: Members, timeout: float
) -> list[int] | None:
    answer = _final(await upstream.post(server, "/tokenize", dump(question), timeout))
    try:
        return tokenized_ids(answer.body).numbers if answer is not None else None
    except msgspec.DecodeError:
        return None


_PASSING = (None, 429, 502, 503, 504)
"""Statuses of failures that tell nothing about what a worker can do: it was busy, or not there."""


def _final(answer: Answer | Refused | Failed) -> Answer | None:
    """The answer; None if the worker says no. Raises ``ProbeFailed`` where asking again may give another answer."""
    if isinstance(answer, Answer):
        return answer
    if answer.status in _PASSING:
        raise ProbeFailed(answer.detail if isinstance(answer, Failed) else f"status {answer.status}")
    return None
