"""A conversation as far as it has come: the messages that every arm sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.multiturn.talk import Json, Turn
from bench.multiturn.words import Measure


@dataclass
class History:
    """The messages of one conversation."""

    measure: Measure
    variant: str
    """See ``Measure.text``."""
    messages: list[Json] = field(default_factory=list)

    def say(self, turn: Turn) -> None:
        """Add what ``turn`` asks.

        A tool's output answers a call by its id. The calls that were recorded are not those of this run, so it
        takes an id of this run's, in order; and where this run's answer called nothing, it is said by the user.
        """
        last = self.messages[-1] if self.messages else {}
        open_calls = [call["id"] for call in last.get("tool_calls") or ()]
        for message in turn.says:
            said = self.measure.said(message, opens=not self.messages, variant=self.variant)
            if said["role"] == "tool" and said.get("tool_call_id") not in open_calls:
                said = _answering(said, open_calls)
            elif said["role"] == "tool":
                open_calls.remove(said["tool_call_id"])
            self.messages.append(said)

    def answered(self, message: Json) -> None:
        """Add an answer."""
        self.messages.append(message)


def _answering(said: Json, open_calls: list[str]) -> Json:
    if open_calls:
        return said | {"tool_call_id": open_calls.pop(0)}
    return {"role": "user", "content": said.get("content") or ""}
