"""What is to be said: conversations as the workloads plan them, before any text is made. Lengths are tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Text to be made. Parts with the same key are the same text."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Made:
    """A message whose text is to be made; its parts' lengths include what the chat template adds."""

    role: str
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        """Of the whole message."""
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A message as it was recorded."""

    message: Json


Message = Made | Recorded


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer."""

    says: tuple[Message, ...]
    """What comes after the last answer."""
    answer_tokens: int
    """The answer's length; an estimate where the answer was recorded as text."""
    wait_seconds: float = 0.0
    """Before this request,"""
    wait_from: Literal["answer", "request"] = "answer"
    """counted from the end of the last answer, or from when the last request was sent."""
    recorded_answer: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation."""

    turns: tuple[Turn, ...]
    arrival_seconds: float = 0.0
    """When its first request came, in a trace; else 0."""
    tools: tuple[Json, ...] = ()
    """Tools that are offered in every request."""
    context: int | None = None
    """What its second prompt was planned to have, where contexts were asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served, and where it came from."""

    talks: tuple[Talk, ...]
    passed_over: int = 0
    """Conversations of the file that were looked at and not taken: too short, or too long for the model."""
