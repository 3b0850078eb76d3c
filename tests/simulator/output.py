"""Generated tokens to text, reasoning and tool calls, as they come."""

from __future__ import annotations

import re
import uuid
from typing import Any

from .tokenizer import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, IncrementalDecoder

Json = dict[str, Any]

_CALL_HEAD = re.compile(r'^\{"name": "((?:[^"\\]|\\.)*)", "arguments": ')


class Output:
    """One choice of an answer. `feed` gives what became sayable with a token.

    Text that may turn out to be the beginning of a stop string is held back. A stop string ends
    the choice here, not in the engine: `stopped` names it, and the engine must be told.
    """

    def __init__(self, *, chat: bool, tools: bool, stops: tuple[str, ...], keep_stop: bool) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.reasoning = ""
        self.content = ""
        self.tool_calls: list[Json] = []
        self.stopped: str | None = None
        self._markers = {THINK, END_THINK} if chat else set()
        if tools:
            self._markers |= {TOOL_CALL, END_TOOL_CALL}
        self._stops = stops
        self._keep_stop = keep_stop
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._decoder = IncrementalDecoder()
        self._held = ""
        self._place = "content"
        self._call, self._call_id, self._said = "", "", 0

    def feed(self, token: int, *, last: bool) -> list[Json]:
        """Take a token; `last` says that the engine ends with it. Gives deltas, maybe none."""
        self.tokens.append(token)
        self._held += self._decoder.feed(token) + (self._decoder.flush() if last else "")
        marker = token in self._markers
        deltas = self._say(self._released(all_of_it=last or marker))
        if marker and self.stopped is None:
            self._turn(token)
        if last and self._place == "call":  # cut off by length: as much as a stream has said
            self._end_call(self._call[:-1])
        return deltas

    @property
    def reasoning_tokens(self) -> int:
        inside, count = False, 0
        for token in self.tokens:
            count += inside and token != END_THINK
            inside = (inside or token == THINK) and token != END_THINK
        return count

    def _released(self, *, all_of_it: bool) -> str:
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, self.stopped = min(found)
            text = self._held[: at + len(self.stopped) if self._keep_stop else at]
            self._held = ""
            return text
        cut = len(self._held) if all_of_it or not self._hold else max(0, len(self._held) - self._hold)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _say(self, text: str) -> list[Json]:
        if not text:
            return []
        self.text += text
        if self._place == "reasoning":
            self.reasoning += text
            return [{"reasoning": text}]
        if self._place == "call":
            return self._say_call(text)
        self.content += text
        return [{"content": text}]

    def _say_call(self, text: str) -> list[Json]:
        self._call += text
        head = _CALL_HEAD.match(self._call)
        if head is None:
            return []
        index = len(self.tool_calls)
        deltas: list[Json] = []
        if not self._call_id:
            self._call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
            function = {"name": head[1], "arguments": ""}
            deltas.append({"id": self._call_id, "type": "function", "index": index, "function": function})
        # The last brace may be the one that closes the call itself.
        arguments = self._call[head.end() : -1]
        if len(arguments) > self._said:
            deltas.append({"index": index, "function": {"arguments": arguments[self._said :]}})
            self._said = len(arguments)
        return [{"tool_calls": [delta]} for delta in deltas]

    def _turn(self, token: int) -> None:
        self._place = {THINK: "reasoning", TOOL_CALL: "call"}.get(token, "content")
        if token == END_TOOL_CALL:
            self._end_call(self._call[:-1])

    def _end_call(self, call: str) -> None:
        head = _CALL_HEAD.match(call)
        if head is not None:
            function = {"name": head[1], "arguments": call[head.end() :]}
            self.tool_calls.append({"id": self._call_id, "type": "function", "function": function})
        self._call, self._call_id, self._said = "", "", 0
