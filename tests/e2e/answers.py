"""Token ids and messages of an answer, whole or streamed, chat or text."""

from __future__ import annotations

from typing import Any

import httpx

from tests.contract.answers import chunks_of, joined, message_of

Json = dict[str, Any]


def _parts(answer: httpx.Response) -> list[Json]:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return chunks_of(answer.text)
    whole: Json = answer.json()
    return [whole]


def ids_of(answer: httpx.Response) -> list[int]:
    """The generated tokens. Fails if there are none: an empty answer would equal any other."""
    choices = [choice for part in _parts(answer) for choice in part["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert ids, answer.text
    return ids


def prompt_ids_of(answer: httpx.Response) -> list[int]:
    """The prompt's tokens."""
    for part in _parts(answer):
        for holder in (part, *part["choices"]):
            if holder.get("prompt_token_ids"):
                ids: list[int] = holder["prompt_token_ids"]
                return ids
    raise AssertionError(f"no prompt ids in {answer.text}")


def said(answer: httpx.Response, path: str) -> Json:
    """The message as a client sends it back."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    message = joined(_parts(answer), path) if streamed else message_of(answer.json(), path)
    return {name: value for name, value in message.items() if value is not None}
