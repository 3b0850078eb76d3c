"""What the APIs have in common: a client's request, and the two legs made from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from proxy.body import dump, raw, read
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


@dataclass(frozen=True)
class ClientRequest:
    """A request as the client sent it, without its private members."""

    members: Members
    model: str
    cache_salt: str
    wants_token_ids: bool
    """Whether the client itself asked for ``return_token_ids``."""
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

    def read(self, members: Members) -> ClientRequest:
        """The request that a client's body is. Raises ``ApiError`` (400) if it is none."""
        self.check(members)
        kept = {name: value for name, value in members.items() if name not in PRIVATE_MEMBERS}
        stop = read(kept, "stop", str | list[str])  # type: ignore[arg-type]
        return ClientRequest(
            members=kept,
            model=read(kept, "model", str) or "",
            cache_salt=read(kept, "cache_salt", str) or "",
            wants_token_ids=bool(read(kept, "return_token_ids", bool)),
            stops_on_text=bool(stop),
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

    @abstractmethod
    def given_ids(self, request: ClientRequest) -> list[int] | None:
        """The prompt's token ids where the client sent them itself."""

    @abstractmethod
    def tokenize_body(self, request: ClientRequest) -> bytes | None:
        """The body for ``/tokenize`` that gives this prompt; None where a full request may say more."""

    @abstractmethod
    def rendered_ids(self, answer: bytes) -> list[int] | None:
        """The token ids in the answer of ``render_path``; None if there are none, or media."""

    @abstractmethod
    def with_ids(self, members: Members, ids: msgspec.Raw, params: Members) -> tuple[Members, Members]:
        """``members`` and ``params`` of a leg such that the engine takes ``ids`` for the prompt."""

    @abstractmethod
    def without_history(self, members: Members) -> Members:
        """``members`` of a leg that has its ids: nothing of the prompt needs to be sent again."""

    def prefill_leg(self, request: ClientRequest, params: Members, ids: msgspec.Raw | None) -> bytes:
        """The body that makes a worker compute the prompt and keep its blocks for decode.

        Without ``ids`` the worker is asked to tell them.
        """
        members: Members = {"max_tokens": raw(1)}
        for name, value in request.members.items():
            match PREFILL_RULES.get(name):
                case None if name != "max_tokens":
                    members[name] = value
                case Rule.ONE:
                    members[name] = raw(1)
        members["stream"] = raw(False)
        if ids is None:
            members["return_token_ids"] = raw(True)
        else:
            members.pop("return_token_ids", None)
            members, params = self.with_ids(self.without_history(members), ids, params)
        return dump(members | {"kv_transfer_params": msgspec.Raw(dump(params))})

    def decode_leg(
        self, request: ClientRequest, params: Members | None, ids: msgspec.Raw | None, *, tell_ids: bool
    ) -> bytes:
        """The client's own request, with where to read the prompt's blocks.

        ``params`` is None for a worker that serves the turn alone. ``tell_ids`` asks for the token ids,
        by which the entry is verified later.
        """
        members = dict(request.members)
        if tell_ids:
            members["return_token_ids"] = raw(True)
        if params is None:
            return dump(members)
        if ids is not None:
            members, params = self.with_ids(members, ids, params)
        return dump(members | {"kv_transfer_params": msgspec.Raw(dump(params))})
