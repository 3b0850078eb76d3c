"""The chat template: a request's messages and tools to the text, and the tokens, of a prompt.

It loses things, as real ones do: white space around contents is trimmed, the reasoning of
answers before the last user message is dropped, tool arguments are written anew.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from .tokenizer import IMAGE, encode

Json = dict[str, Any]

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and what the placeholders in it stand for, in order."""

    ids: tuple[int, ...]
    media: tuple[str, ...] = ()
    text: str = ""


def render_chat(body: Json, *, whole_request: bool = True) -> Prompt:
    """The prompt of a chat request.

    With `whole_request` off only what `/tokenize` knows is looked at: fields of a full request
    that change the prompt (reasoning effort, documents) are missed, as on the real endpoint.
    """
    messages: list[Json] = body["messages"]
    kwargs: Json = body.get("chat_template_kwargs") or {}
    media: list[str] = []
    parts = [_header(body, messages, media, whole_request=whole_request)]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    open_ended = bool(body.get("continue_final_message"))
    for index, message in enumerate(messages):
        if index == 0 and message["role"] in ("system", "developer"):
            continue
        parts.append(f"<|im_start|>{message['role']}\n{_body(message, media, index > last_user)}")
        if not (open_ended and index == len(messages) - 1):
            parts.append("<|im_end|>\n")
    if body.get("add_generation_prompt", True) and not open_ended:
        parts.append("<|im_start|>assistant\n")
        if kwargs.get("enable_thinking") is False:
            parts.append("<think></think>")
    text = "".join(parts)
    return Prompt(tuple(encode(text)), tuple(media), text)


def media_keys(prompt: Prompt) -> dict[int, int]:
    """What stands at each placeholder position: equal ids, different contents."""
    positions = [index for index, token in enumerate(prompt.ids) if token == IMAGE]
    return {at: hash(("media", source)) for at, source in zip(positions, prompt.media, strict=False)}


def has_media(messages: list[Json]) -> bool:
    """Whether any content part is something else than text."""
    return any(
        isinstance(part, dict) and part.get("type", "text") not in ("text", "refusal")
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _header(body: Json, messages: list[Json], media: list[str], *, whole_request: bool) -> str:
    lines = []
    if messages and messages[0]["role"] in ("system", "developer"):
        lines.append(_content(messages[0].get("content"), media))
    if whole_request and body.get("reasoning_effort"):
        lines.append(f"Reasoning: {body['reasoning_effort']}")
    if whole_request and body.get("documents"):
        lines.append(f"# Documents\n{json.dumps(body['documents'])}")
    if body.get("tools"):
        lines.append("# Tools\n" + "\n".join(json.dumps(tool["function"]) for tool in body["tools"]))
    return "<|im_start|>system\n" + "\n\n".join(lines) + "<|im_end|>\n" if lines else ""


def _body(message: Json, media: list[str], current: bool) -> str:
    text = _content(message.get("content"), media)
    if message["role"] != "assistant":
        return text
    text = _THOUGHT.sub("", text).strip()
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if current and reasoning:
        text = f"<think>{reasoning}</think>{text}"
    return text + "".join(_tool_call(call["function"]) for call in message.get("tool_calls") or ())


def _tool_call(function: Json) -> str:
    arguments = function.get("arguments", "{}")
    with contextlib.suppress(TypeError, ValueError):
        arguments = json.loads(arguments)
    call = {"name": function["name"], "arguments": arguments}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def _content(content: Any, media: list[str]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    texts = []
    for part in content:
        kind = part if isinstance(part, str) else part.get("type", "text")
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "refusal"):
            texts.append(part.get("text", part.get("refusal", "")))
        else:
            media.append(json.dumps(part, sort_keys=True))
            texts.append("<|image|>")
    return "".join(texts).strip()
