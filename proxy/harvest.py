"""Decode's answer on its way out: what is private stays here, the rest goes on as it came.

The router asks decode for token ids and KV parameters that the client did not ask for. Whole answers
and chunks of a stream have the same form, in chat and in text completions: KV parameters at the top,
the prompt's ids at the top or in the choice, the generated ids in the choice.
"""

import time
from collections.abc import Iterator

import msgspec

from proxy.body import NULL, NotAnObject, dump, parse, read
from proxy.sse import each
from proxy.token_ids import TokenIds
from proxy.usual_chunk import UsualChunks, without_prompt
from router.kv_params import Members

_choices = msgspec.json.Decoder(list[Members]).decode
_ENDS_RETAINED = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons of an engine's stop or length, as the APIs show them; after any other it frees at once."""

_NO_CHOICES = msgspec.Raw(b"[]")
_EMPTY_DELTA = msgspec.Raw(b"{}")


class Harvest:
    """What was learned from one answer of decode, and what of it the client may see."""

    def __init__(self, *, client_wants_ids: bool) -> None:
        self._client_wants_ids = client_wants_ids
        self.prompt_ids: TokenIds | None = None
        self.generated: list[int] = []
        self.params: msgspec.Raw | None = None
        self.failed = False
        """Whether an error came instead of, or in the middle of, the answer."""
        self.finished: str | None = None
        """The last finish reason seen."""
        self.held_up = 0.0
        """Seconds for which the client, by reading slowly, kept us from reading on."""
        self._told_at: float | None = None
        self._complete = True
        self._usual = UsualChunks()

    @property
    def since_told(self) -> float:
        """Seconds since, at the latest, decode said what it holds: its blocks' time began before that."""
        return 0.0 if self._told_at is None else time.monotonic() - self._told_at

    @property
    def complete(self) -> bool:
        """Whether all was learned that the next turn needs: it comes with the last chunk that says something."""
        return self.params is not None and self.ended_well

    @property
    def ended_well(self) -> bool:
        """Whether the answer came to an end of the kind after which the engine retains blocks."""
        return not self.failed and self.finished in _ENDS_RETAINED

    @property
    def tokens(self) -> list[int] | None:
        """Prompt and generated ids, as decode told them; None if it did not, or left some out."""
        prompt = self.prompt_tokens
        return prompt + self.generated if prompt is not None and self._complete else None

    @property
    def prompt_tokens(self) -> list[int] | None:
        """The prompt's ids, as decode told them. Not to be asked for before they have come."""
        if self.prompt_ids is None:
            return None
        try:
            return self.prompt_ids.numbers
        except msgspec.DecodeError:
            return None

    def take_usual(self, events: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """Each of a stream's ``events``, and what it is without its token ids, which are learned; None where it is for
        ``take_opening`` or ``take`` to read.
        """
        if self._client_wants_ids:
            return ((event, None) for event in each(events))
        return self._usual.without_ids(events, self.generated)

    def take_opening(self, event: bytes) -> bytes | None:
        """``event`` without the prompt's ids, which are learned; None if it is for ``take`` to read."""
        if self._client_wants_ids or (opening := without_prompt(event)) is None:
            return None
        shown, ids = opening
        self.prompt_ids = TokenIds(ids)
        return shown

    def take(self, data: bytes) -> bytes | None:
        """``data`` (a whole answer, or one chunk) without what is private.

        None for a chunk that is there only because token ids were asked for. What is not JSON, or has
        nothing private, comes back as the same bytes.
        """
        if b"token_ids" not in data and b"kv_transfer_params" not in data and b'"error"' not in data:
            if b'"finish_reason"' in data:
                # A chunk with text and without ids: those that follow cannot be placed any more.
                self._complete = self._complete and b'"choices":[]' in data
            return data
        try:
            members = parse(data)
        except NotAnObject:
            return data
        if members.get("error", NULL) != NULL:
            self.failed = True
        if (params := members.pop("kv_transfer_params", None)) is not None and params != NULL:
            self.params = params
            self._told_at = time.monotonic() - self.held_up
        self._prompt_in(members)
        choices = self._take_choices(members)
        if choices == []:
            return None
        if choices is not None:
            members["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return dump(members)

    def _take_choices(self, members: Members) -> list[Members] | None:
        """The choices as the client may see them; None if there are none to look at."""
        raw = members.get("choices", NULL)
        if raw in (_NO_CHOICES, NULL):
            return None
        try:
            choices = _choices(raw)
        except msgspec.DecodeError:
            return None
        kept = []
        for choice in choices:
            self._prompt_in(choice)
            self._generated_in(choice)
            self.finished = read(choice, "finish_reason", str) or self.finished
            if self._client_wants_ids:
                kept.append(choice)
            elif not _only_ids(choice):
                choice.pop("token_ids", None)
                kept.append(choice)
        return kept

    def _prompt_in(self, holder: Members) -> None:
        ids = holder.get("prompt_token_ids")
        if ids is not None and ids != NULL:
            self.prompt_ids = TokenIds(ids)
        if not self._client_wants_ids:
            holder.pop("prompt_token_ids", None)

    def _generated_in(self, choice: Members) -> None:
        ids = read(choice, "token_ids", list[int])
        if ids is not None:
            self.generated += ids
        elif not _is_opening(choice):
            self._complete = False


def _is_opening(choice: Members) -> bool:
    """Whether this is the chunk that only names the role, before any token."""
    delta = read(choice, "delta", dict[str, msgspec.Raw])
    return delta is not None and "role" in delta


def _only_ids(choice: Members) -> bool:
    """Whether the engine sent this choice for its token ids alone: it says nothing else."""
    return (
        choice.get("delta") == _EMPTY_DELTA
        and choice.get("logprobs", NULL) == NULL
        and choice.get("finish_reason", NULL) == NULL
    )
