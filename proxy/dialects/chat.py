"""``/v1/chat/completions``."""

import msgspec

from proxy.body import NULL, dump, raw, read
from proxy.dialects.base import NEUTRAL_MEMBERS, ClientRequest, Dialect, is_off, served_alone
from proxy.errors import bad_request
from proxy.token_ids import TokenIds
from router.kv_params import Members
from router.reuse import Reason

_Part = dict[str, msgspec.Raw]


class _Message(msgspec.Struct):
    content: msgspec.Raw = NULL
    """Read only where it is a list: an agent's history has megabytes of text."""


_parts = msgspec.json.Decoder(list[str | _Part]).decode


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: msgspec.Raw = NULL


_rendered = msgspec.json.Decoder(_Rendered).decode

_TEXT_MEMBERS = frozenset(
    {"type", "text", "refusal", "thinking", "reasoning", "cache_control", "annotations", "signature"}
)
"""What a part of a message's content may have and be text: media can come with any type, or none."""

_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})

_TOKENIZE_MEMBERS = frozenset(
    {"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
     "chat_template", "chat_template_kwargs"}
)  # fmt: skip

_IN_THE_PROMPT = frozenset(
    {"tools", "tool_choice", "response_format", "documents", "chat_template", "chat_template_kwargs",
     "add_generation_prompt", "continue_final_message", "reasoning_effort", "truncate_prompt_tokens",
     "truncation_side", "add_special_tokens"}
)  # fmt: skip

_ANY_MESSAGE = raw([{"role": "user", "content": "."}])


class ChatCompletions(Dialect):
    """OpenAI's chat completions, with vLLM's additions."""

    name = "chat"
    path = "/v1/chat/completions"

    def check(self, members: Members) -> None:
        """See ``Dialect.check``."""
        if "messages" not in members:
            raise bad_request("The request has no messages.", "messages")

    def alone(self, request: ClientRequest) -> Reason | None:
        """See ``Dialect.alone``."""
        return served_alone(request.members)

    def opaque(self, request: ClientRequest) -> Reason | None:
        """Media: equal placeholder ids do not mean equal content. ``echo`` makes the engine ignore given ids."""
        if not is_off(request.members, "echo"):
            return Reason.ECHO
        messages = read(request.members, "messages", list[_Message])
        if messages is None:
            return Reason.MEDIA
        return None if all(_only_text(message.content) for message in messages) else Reason.MEDIA

    def given_ids(self, request: ClientRequest) -> list[int] | None:
        """A chat has none."""
        return None

    def tokenize_body(self, request: ClientRequest) -> bytes | None:
        """See ``Dialect.tokenize_body``."""
        members = request.members
        if not members.keys() <= _TOKENIZE_MEMBERS | NEUTRAL_MEMBERS | {"tool_choice"}:
            return None
        if not is_off(members, "tool_choice", b'"auto"'):
            return None
        return dump({name: value for name, value in members.items() if name in _TOKENIZE_MEMBERS})

    def rendered_ids(self, answer: bytes) -> TokenIds | None:
        """See ``Dialect.rendered_ids``."""
        rendered = _rendered(answer)
        return TokenIds.read(rendered.token_ids) if bytes(rendered.features) == b"null" else None

    def with_ids(self, members: Members, ids: msgspec.Raw, params: Members) -> tuple[Members, Members]:
        """In ``kv_transfer_params``: known from vLLM 0.28 on, ignored before."""
        return members, params | {"prompt_token_ids": ids}

    def without_history(self, members: Members) -> Members:
        """Only towards a worker that was seen to take the ids: another would answer the mutilated prompt."""
        kept = {name: value for name, value in members.items() if name not in _IN_THE_PROMPT}
        return kept | {"messages": _ANY_MESSAGE}


def _only_text(content: msgspec.Raw) -> bool:
    begin = bytes(memoryview(content)[:1])
    if begin == b'"' or content == NULL:
        return True
    try:
        return begin == b"[" and all(_is_text(part) for part in _parts(content))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _is_text(part: str | _Part) -> bool:
    if isinstance(part, str):
        return True
    kind = read(part, "type", str) if "type" in part else "text"
    return kind in _TEXT_TYPES and part.keys() <= _TEXT_MEMBERS
