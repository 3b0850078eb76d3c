"""A request body to what the engine core runs."""

from __future__ import annotations

import copy
import json
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

from .model import Sampling, Writer
from .options import Options
from .sequence import Sequenced
from .template import Prompt, has_media, media_keys, render_chat
from .tokenizer import encode
from .validation import Refused, check_ids, check_length, check_model, check_values

Json = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A request that was found good: one sequence per prompt and choice."""

    body: Json
    chat: bool
    request_id: str
    prompts: tuple[Prompt, ...]
    sequences: tuple[Sequenced, ...]

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.body.get("stop") or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def parses_tools(self) -> bool:
        return bool(self.chat and self.body.get("tools") and self.body.get("tool_choice") != "none")

    @property
    def hides_reasoning(self) -> bool:
        """Reasoning is asked to be left out, which takes token ids and log-probabilities along."""
        return self.chat and self.body.get("include_reasoning") is False

    @property
    def shows_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))


def render(body: Json, options: Options, *, chat: bool) -> tuple[Prompt, ...]:
    """The prompts of a request. Takes token ids out of the KV parameters where that is known.

    Only chat requests know `kv_transfer_params.prompt_token_ids`; on text completions they are
    neither looked at nor removed.
    """
    if not chat:
        return _text_prompts(body["prompt"])
    params = body.get("kv_transfer_params")
    if isinstance(params, dict) and options.honours_prompt_token_ids:
        ids = params.pop("prompt_token_ids", None)
        if ids is not None and not body.get("echo") and not has_media(body["messages"]):
            return (Prompt(check_ids(ids, "kv_transfer_params.prompt_token_ids")),)
    try:
        return (render_chat(body),)
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"Error in the chat template: {error}") from None


def _text_prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (Prompt(tuple(encode(prompt)), text=prompt),)
    if isinstance(prompt[0], int):
        return (Prompt(check_ids(prompt, "prompt")),)
    return tuple(found for one in prompt for found in _text_prompts(one))


def prepare(body: Json, options: Options, *, chat: bool, header_id: str | None) -> Prepared:
    """Check the values of a well-formed request and make its sequences."""
    body = copy.deepcopy(body)
    check_model(body, options)
    prompts = render(body, options, chat=chat)
    external_id = header_id or body.get("request_id") or uuid.uuid4().hex
    request_id = f"{'chatcmpl' if chat else 'cmpl'}-{external_id}"
    n = body.get("n") or 1
    sequences = []
    for index, prompt in enumerate(prompts):
        check_length(len(prompt.ids), options)
        wanted = _max_tokens(body, chat=chat)
        room = options.context_length - len(prompt.ids)
        max_tokens = room if wanted is None else min(wanted, room)
        check_values(body, max_tokens)
        name = request_id if chat else f"{request_id}-{index}"
        for choice in range(n):
            one = f"{choice}_{name}" if n > 1 else name
            sequences.append(_sequence(body, options, prompt, one, max_tokens))
    return Prepared(body, chat, request_id, prompts, tuple(sequences))


def _max_tokens(body: Json, *, chat: bool) -> int | None:
    value: int | None = body.get("max_tokens")
    if not chat:
        return 16 if value is None else value
    newer: int | None = body.get("max_completion_tokens")
    return value if newer is None else newer


def _sequence(body: Json, options: Options, prompt: Prompt, name: str, max_tokens: int) -> Sequenced:
    temperature = body.get("temperature")
    top_p = body.get("top_p")
    model = body.get("model")
    shape = body.get("tools"), body.get("tool_choice")
    extras = json.dumps([body.get("response_format"), body.get("logit_bias")], sort_keys=True)
    seed = body.get("seed")
    return Sequenced(
        request_id=f"{name}-{uuid.uuid4().hex[:8]}",
        prompt=prompt.ids,
        params=copy.deepcopy(body.get("kv_transfer_params") or None),
        sampling=Sampling(
            temperature=1.0 if temperature is None else temperature,
            seed=seed,
            top_p=1.0 if top_p is None else top_p,
            constraint=0 if extras == "[null, null]" else zlib.crc32(extras.encode()),
        ),
        writer=Writer(prompt.ids, *shape),
        max_tokens=max_tokens,
        min_tokens=body.get("min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
        adapter=zlib.crc32(model.encode()) if model in options.adapters else 0,
        salt=body.get("cache_salt"),
        skip_cache=body.get("prompt_logprobs") is not None,
        media=media_keys(prompt),
    )
