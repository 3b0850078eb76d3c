"""What an engine refuses, in vLLM's words and shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .options import Options
from .tokenizer import VOCABULARY_SIZE

Json = dict[str, Any]


class Refused(Exception):
    """A request that is answered with an error before anything is computed.

    `parsed` says that the request itself was well-formed, so that the engine, which has its KV
    parameters at hand, tells the remote side that its blocks are not needed.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
        parsed: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, status, param)
        self.parsed = parsed


def error_body(message: str, kind: str, status: int, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _malformed(message: str, param: str | None = None) -> Refused:
    text = f"1 validation error:\n  {message}"
    return Refused(text, param=param, kind="Bad Request", parsed=False)


def parse(raw: bytes, content_type: str) -> Json:
    """The body as an object."""
    if content_type.lower().split(";")[0] != "application/json":
        raise _malformed("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise _malformed(f"JSON decode error: {error}", "body") from None
    if not isinstance(body, dict):
        raise _malformed("Input should be a valid dictionary", "body")
    return body


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "min_tokens": (int,),
    "n": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": (int,),
    "stream": (bool,),
    "stream_options": (dict,),
    "stop": (str, list),
    "tools": (list,),
    "tool_choice": (str, dict),
    "kv_transfer_params": (dict,),
    "return_token_ids": (bool,),
    "include_reasoning": (bool,),
    "cache_salt": (str,),
    "chat_template_kwargs": (dict,),
}


def check(body: Json, options: Options, *, chat: bool) -> None:
    """Refuse what cannot be parsed into a request. Says nothing about its values."""
    for name, types in _TYPES.items():
        value = body.get(name)
        wrong_bool = isinstance(value, bool) and bool not in types
        if value is not None and (not isinstance(value, types) or wrong_bool):
            raise _malformed(f"Input should be a valid {types[0].__name__}", f"body.{name}")
    for name in sorted(options.forbidden_members & body.keys()):
        raise _malformed(f"`{name}` must not reach an engine", name)
    if body.get("stream_options") and not body.get("stream"):
        raise _malformed("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("prompt_logprobs") is not None and body.get("stream") and body["prompt_logprobs"] > 0:
        raise _malformed("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    (_check_chat if chat else _check_text)(body)


def _check_chat(body: Json) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _malformed("Field required", "body.messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _malformed("Input should be a valid message", f"body.messages.{index}")
        if not isinstance(message.get("content"), str | list | None):
            raise _malformed("Input should be a valid string", f"body.messages.{index}.content")
    if body.get("tools") == []:
        raise _malformed("`tools` must not be an empty array.", "tools")
    choice = body.get("tool_choice", "none")
    if choice != "none" and choice is not None and not body.get("tools"):
        raise _malformed("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in [tool.get("function", {}).get("name") for tool in body["tools"]]:
            raise _malformed("The tool specified in `tool_choice` does not match any", "tool_choice")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise _malformed("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise _malformed("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


def _check_text(body: Json) -> None:
    prompt = body.get("prompt")
    if prompt is None or prompt in ("", []):
        raise _malformed("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if not isinstance(prompt, str | list):
        raise _malformed("Input should be a valid string", "body.prompt")


def check_model(body: Json, options: Options) -> None:
    name = body.get("model")
    if name and name != options.model and name not in options.adapters:
        raise Refused(
            f"The model `{name}` does not exist. Valid aliases: {options.model}.",
            param="model",
            status=404,
            kind="NotFoundError",
        )


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "in [0, 2]"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "n": (lambda value: 1 <= value <= 64, "at least 1"),
    "min_tokens": (lambda value: value >= 0, "greater than or equal to 0"),
}


def check_values(body: Json, max_tokens: int) -> None:
    """Refuse sampling parameters that make no sense."""
    for name, (holds, wanted) in _RANGES.items():
        value = body.get(name)
        if value is not None and not holds(value):
            raise Refused(f"{name} must be {wanted}, got {value}.", param=name)
    if max_tokens < 1:
        raise Refused(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    least = body.get("min_tokens") or 0
    if least > max_tokens:
        raise Refused(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}.")
    stop = body.get("stop")
    if stop == "" or (isinstance(stop, list) and "" in stop):
        raise Refused("stop cannot contain an empty string.")


def check_ids(ids: Any, name: str) -> tuple[int, ...]:
    """Token ids that a request brings along."""
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise Refused(f"`{name}` must be a non-empty list of non-negative integers.", param=name)
    if max(ids) >= VOCABULARY_SIZE:
        raise Refused(f"Token id {max(ids)} is out of vocabulary", param=name)
    return tuple(ids)


def check_length(prompt: int, options: Options) -> None:
    if prompt >= options.context_length:
        raise Refused(
            f"This model's maximum context length is {options.context_length} tokens. "
            f"However, your request has {prompt} input tokens.",
            param="input_tokens",
        )
