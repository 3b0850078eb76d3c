"""``/v1/completions``."""

import msgspec

from proxy.body import dump, read
from proxy.dialects.base import NEUTRAL_MEMBERS, ClientRequest, Dialect, is_off, served_alone
from proxy.errors import bad_request
from proxy.token_ids import TokenIds
from router.kv_params import Members
from router.reuse import Reason


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw


_CUTS_THE_PROMPT = ("truncate_prompt_tokens", "truncation_side")
"""The ids are those of the prompt as it was cut."""

_TOKENIZE_MEMBERS = frozenset({"model", "prompt", "add_special_tokens"})


class Completions(Dialect):
    """OpenAI's text completions, with vLLM's additions."""

    name = "completions"
    path = "/v1/completions"

    def check(self, members: Members) -> None:
        """See ``Dialect.check``."""
        if "prompt" not in members and "prompt_embeds" not in members:
            raise bad_request("The request has no prompt.", "prompt")

    def alone(self, request: ClientRequest) -> Reason | None:
        """See ``Dialect.alone``."""
        members = request.members
        if _one_prompt(members) is None and "prompt_embeds" not in members:
            return Reason.SEVERAL_PROMPTS
        if not is_off(members, "echo"):
            # Echoed text comes with log-probabilities of the prompt, or with max_tokens 0.
            return Reason.ECHO
        return served_alone(members)

    def opaque(self, request: ClientRequest) -> Reason | None:
        """A prompt given as embeddings, in part or in whole, is not told by ids."""
        return Reason.MEDIA if "prompt_embeds" in request.members else None

    def given_ids(self, request: ClientRequest) -> list[int] | None:
        """See ``Dialect.given_ids``."""
        if "truncate_prompt_tokens" in request.members:
            return None
        prompt = _one_prompt(request.members)
        return prompt if isinstance(prompt, list) else None

    def tokenize_body(self, request: ClientRequest) -> bytes | None:
        """See ``Dialect.tokenize_body``."""
        members = request.members
        if not members.keys() <= _TOKENIZE_MEMBERS | NEUTRAL_MEMBERS or not isinstance(_one_prompt(members), str):
            return None
        return dump({name: value for name, value in members.items() if name in _TOKENIZE_MEMBERS})

    def rendered_ids(self, answer: bytes) -> TokenIds | None:
        """See ``Dialect.rendered_ids``: here a list, one item a prompt."""
        rendered = msgspec.json.decode(answer, type=list[_Rendered])
        return TokenIds.read(rendered[0].token_ids) if len(rendered) == 1 else None

    def with_ids(self, members: Members, ids: msgspec.Raw, params: Members) -> tuple[Members, Members]:
        """As the prompt itself, which every version takes; none looks for them in ``kv_transfer_params``."""
        kept = {name: value for name, value in members.items() if name not in _CUTS_THE_PROMPT}
        return kept | {"prompt": ids}, params

    def without_history(self, members: Members) -> Members:
        """The prompt is replaced by the ids anyway."""
        return members


def _one_prompt(members: Members) -> str | list[int] | None:
    """The prompt if it is one; a list of one prompt is left to the engine like any list of prompts."""
    return read(members, "prompt", str | list[int])  # type: ignore[arg-type]
