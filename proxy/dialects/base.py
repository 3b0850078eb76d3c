"""What the APIs have in common: a client's request, and the two legs made from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum

import msgspec

from proxy.body import dump, raw, read
from proxy.token_ids import TokenIds
from router.kv_params import Members
from router.reuse import Reason


class Rule(Enum):
    """What becomes of a member of the client's request on the prefill leg. Without a rule it is kept."""

    DROP = "drop"
    ONE = "one"
    """1, where the client sent it."""


PRIVATE_MEMBERS = ("conversation_id", "kv_transfer_params")
"""Taken out of what the client sent: the one is ours, the other would name blocks to an engine that trusts it."""

PREFILL_RULES: Mapping[str, Rule] = {
    # Prefill generates one token, at once, and its text is thrown away.
    "max_completion_tokens": Rule.ONE,
    "stream": Rule.DROP,
    "stream_options": Rule.DROP,
    "min_tokens": Rule.DROP,
    "n": Rule.DROP,
    "best_of": Rule.DROP,
    "echo": Rule.DROP,
    # Log-probabilities of that token are of no use, and the engine refuses one of these without the other.
    "logprobs": Rule.DROP,
    "top_logprobs": Rule.DROP,
    "prompt_logprobs": Rule.DROP,
    "logprob_token_ids": Rule.DROP,
    "return_tokens_as_token_ids": Rule.DROP,
    # One token of a grammar is not worth compiling it. ``response_format`` is not here: some models' prompts
    # show it, so it goes only where the ids are given.
    "structured_outputs": Rule.DROP,
    "structural_tag": Rule.DROP,
    "guided_json": Rule.DROP,
    "guided_regex": Rule.DROP,
    "guided_choice": Rule.DROP,
    "guided_grammar": Rule.DROP,
    "guided_decoding_backend": Rule.DROP,
    "guided_whitespace_pattern": Rule.DROP,
}

NEUTRAL_MEMBERS = frozenset(PREFILL_RULES) - {"echo", "structural_tag"} | {
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "user",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "return_token_ids", "priority", "request_id", "cache_salt", "metadata",
    "prompt_cache_key", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "stream_interval",
}  # fmt: skip
"""Members known to have no part in the prompt: what ``/tokenize`` need not be told."""


_ONE, _TRUE, _FALSE = raw(1), raw(True), raw(False)

_OFF = tuple(msgspec.Raw(value) for value in (b"null", b"false", b"[]", b'""'))


def is_off(members: Members, name: str, *also: bytes) -> bool:
    """Whether a member is not there, or says no in the plainest way, or is one of ``also``.

    The engine takes ``1``, ``"true"`` and ``"2"`` for what they look like. What decides whether reuse is right
    is on unless it is surely off.
    """
    value = members.get(name)
    return value is None or value in _OFF or bytes(value) in also


class ClientRequest(msgspec.Struct, frozen=True):
    """A request as the client sent it, without its private members."""

    members: Members
    model: str
    cache_salt: str
    streams: bool
    """Whether the client asked for a stream."""
    wants_token_ids: bool
    """Whether the client itself asked for ``return_token_ids``."""
    max_tokens: int | None
    """How long the answer may be; None if the client does not say."""
    forwarded: Mapping[str, str]
    """Headers of the client's that its legs carry; its credential only if the operator set so."""
    stops_on_text: bool
    """Whether it names stop strings: an answer that ends with one is not retained by the engine."""


class Dialect(ABC):
    """One API: its addresses and its members."""

    name: str
    path: str

    @property
    def render_path(self) -> str:
        """Where the engine tells the token ids of a request."""
        return f"{self.path}/render"

    def read(self, members: Members, forwarded: Mapping[str, str]) -> ClientRequest:
        """The request that a client's body is. Raises ``ApiError`` (400) if it is none."""
        self.check(members)
        kept = {name: value for name, value in members.items() if name not in PRIVATE_MEMBERS}
        return ClientRequest(
            members=kept,
            model=read(kept, "model", str) or "",
            cache_salt=read(kept, "cache_salt", str) or "",
            wants_token_ids=not is_off(kept, "return_token_ids"),
            streams=not is_off(kept, "stream"),
            max_tokens=read(kept, "max_completion_tokens", int) or read(kept, "max_tokens", int),
            forwarded=forwarded,
            stops_on_text=not is_off(kept, "stop"),
        )

    @abstractmethod
    def check(self, members: Members) -> None:
        """Raises ``ApiError`` (400) where no engine needs to be asked."""

    @abstractmethod
    def alone(self, request: ClientRequest) -> Reason | None:
        """Why decode must serve this by itself; None if the legs can be split.

        Several answers or prompts make several engine requests share one set of remote blocks, which the
        transfer does not count right; log-probabilities of the prompt need the prompt computed on decode.
        """

    @abstractmethod
    def opaque(self, request: ClientRequest) -> Reason | None:
        """Why the prompt is more than its token ids, so that nothing may be reused; None if it is not."""

    def wants_ids_first(self, request: ClientRequest) -> bool:
        """Whether prefill should be told the ids on a first turn already.

        Some models' prompts show ``response_format``. With the ids, prefill needs neither it nor its grammar.
        """
        return "response_format" in request.members

    @abstractmethod
    def given_ids(self, request: ClientRequest) -> list[int] | None:
        """The prompt's token ids where the client sent them itself."""

    @abstractmethod
    def tokenize_body(self, request: ClientRequest) -> bytes | None:
        """The body for ``/tokenize`` that gives this prompt; None where a full request may say more."""

    @abstractmethod
    def rendered_ids(self, answer: bytes) -> TokenIds | None:
        """The token ids in the answer of ``render_path``; None if there are none, or media."""

    @abstractmethod
    def with_ids(self, members: Members, ids: msgspec.Raw, params: Members) -> tuple[Members, Members]:
        """``members`` and ``params`` of a leg such that the engine takes ``ids`` for the prompt."""

    @abstractmethod
    def without_history(self, members: Members) -> Members:
        """``members`` of a leg that has its ids: nothing of the prompt needs to be sent again."""

    def one_token_leg(
        self, request: ClientRequest, params: Members, ids: msgspec.Raw | None, *, tell_ids: bool
    ) -> bytes:
        """The body that makes a worker take in the prompt and answer with one token.

        ``ids`` are the prompt's token ids, for a worker that takes them; ``tell_ids`` asks to be told them.
        """
        members: Members = {"max_tokens": _ONE}
        for name, value in request.members.items():
            match PREFILL_RULES.get(name):
                case None if name not in ("max_tokens", "return_token_ids"):
                    members[name] = value
                case Rule.ONE:
                    members[name] = _ONE
        members["stream"] = _FALSE
        if tell_ids:
            members["return_token_ids"] = _TRUE
        if ids is not None:
            members, params = self.with_ids(self.without_history(members), ids, params)
        return _with_params(members, params)

    def decode_leg(
        self, request: ClientRequest, params: Members | None, ids: msgspec.Raw | None, *, tell_ids: bool
    ) -> bytes:
        """The client's own request, with where to read the prompt's blocks.

        ``params`` is None for a worker that serves the turn alone. ``tell_ids`` asks for the token ids,
        by which the entry is verified later.
        """
        members = dict(request.members)
        if tell_ids:
            members["return_token_ids"] = _TRUE
        if params is None:
            return dump(members)
        if ids is not None:
            members, params = self.with_ids(members, ids, params)
        return _with_params(members, params)


def _with_params(members: Members, params: Members) -> bytes:
    return msgspec.json.encode({**members, "kv_transfer_params": params})


def served_alone(members: Members) -> Reason | None:
    """Why a request of any API must be served by decode alone; None if its legs can be split."""
    if not (is_off(members, "n", b"1") and is_off(members, "best_of", b"1") and is_off(members, "use_beam_search")):
        return Reason.SEVERAL_ANSWERS
    if not is_off(members, "prompt_logprobs"):
        return Reason.PROMPT_LOGPROBS
    if not is_off(members, "truncate_prompt_tokens") and (read(members, "truncate_prompt_tokens", int) or -1) < 0:
        # -1 means what the answer's length leaves over, and the two legs ask for answers of different lengths.
        return Reason.TRUNCATION
    return None
