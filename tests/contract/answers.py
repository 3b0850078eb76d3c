"""Reading answers: the same message, whether it came whole or in pieces."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

OPENING = "Tell me of the sea, of ships and of the people who sail on them, please, and at some length. " * 2
"""More tokens than any threshold in these tests."""

DONE = "data: [DONE]\n\n"


def user(text: str) -> Json:
    """A message of the user's."""
    return {"role": "user", "content": text}


def chat(messages: list[Json], **more: object) -> Json:
    """A chat request to a simulator."""
    return {"model": "sim-model", "messages": messages, "temperature": 0, "max_tokens": 24} | more


def chunks_of(stream: str) -> list[Json]:
    """What each event of a stream carries; the stream must end with the end mark."""
    assert stream.endswith(DONE), stream[-300:]
    return [json.loads(event[6:]) for event in stream.removesuffix(DONE).split("\n\n") if event.startswith("data: ")]


def message_of(answer: Json, path: str) -> Json:
    """What a whole answer says: text, reasoning, tool calls without their random ids."""
    choice = answer["choices"][0]
    if path == TEXT:
        return {"text": choice["text"]}
    message = choice["message"]
    return _said(
        message.get("role"),
        message.get("content"),
        message.get("reasoning") or message.get("reasoning_content"),
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []],
    )


def joined(chunks: list[Json], path: str) -> Json:
    """The same from the chunks of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if path == TEXT:
        return {"text": "".join(choice["text"] for choice in choices)}
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or []:
            name_and_arguments = calls.setdefault(call["index"], ["", ""])
            name_and_arguments[0] += call["function"].get("name") or ""
            name_and_arguments[1] += call["function"].get("arguments") or ""
    return _said(
        "".join(delta.get("role") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning") or delta.get("reasoning_content") or "" for delta in deltas),
        [(name, arguments) for name, arguments in calls.values()],
    )


def _said(role: str | None, content: str | None, reasoning: str | None, calls: list[tuple[str, str]]) -> Json:
    message: Json = {"role": role, "content": content or None, "reasoning": reasoning or None}
    if calls:
        message["tool_calls"] = [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message
