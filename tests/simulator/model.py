"""The language model: keys and values from tokens, next tokens from keys and values.

What a position holds depends on everything held before it, *as held*. So a prompt whose
beginning was copied from elsewhere goes on from what was copied, right or wrong, and a single
wrong value anywhere changes every later one and the answer, while the status stays 200.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .tokenizer import (
    END_THINK,
    END_TOOL_CALL,
    EOS,
    FIRST_WORDS,
    IM_START,
    LATER_WORDS,
    THINK,
    TOOL_CALL,
    decode,
    encode,
    halves,
)

SLIDING_WINDOW = 32
"""Positions that a layer of the second cache group looks back on."""


class Attention:
    """Reads held values in order and gives the values of the position that follows them."""

    def __init__(self, groups: int, adapter: int) -> None:
        self._adapter = adapter
        self._full = 0
        self._window: deque[int] | None = deque(maxlen=SLIDING_WINDOW) if groups > 1 else None

    def see(self, held: Sequence[int]) -> None:
        """Take in what one position holds, one value per cache group."""
        self._full = hash((self._full, held[0]))
        if self._window is not None:
            self._window.append(held[1])

    def values(self, key: int) -> tuple[int, ...]:
        """What the next position will hold if its token is `key`."""
        mixed = hash((self.state, key, self._adapter))
        return (hash((mixed, 0)),) if self._window is None else (hash((mixed, 0)), hash((mixed, 1)))

    @property
    def state(self) -> int:
        """A number that depends on all that was seen."""
        return hash((self._full, *(self._window or ())))


def true_values(keys: Iterable[int], groups: int, adapter: int) -> list[tuple[int, ...]]:
    """What a cold prefill of these tokens leaves in the cache."""
    attention = Attention(groups, adapter)
    values = []
    for key in keys:
        values.append(attention.values(key))
        attention.see(values[-1])
    return values


@dataclass(frozen=True)
class Sampling:
    """What of a request decides about the next token, beside the cache."""

    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    constraint: int = 0
    """A digest of whatever else bears on the choice: response format, biases."""

    def draw(self, state: int) -> int:
        """A number from the state of the cache; greedy requests ignore seed and `top_p`."""
        luck = (0,) if self.temperature == 0 else (self.temperature, self.seed or 0, self.top_p)
        return hash((state, self.constraint, *luck)) & 0x7FFF_FFFF_FFFF_FFFF


class Writer:
    """Gives an answer its shape (reasoning, tool call, text, end); the draws choose its words.

    Words in the last user message direct it: `[think]` reasons first, `[tool]` calls a tool if
    there is one, `[halves]` spells words in tokens that `encode` would not choose, `[long]`
    never ends by itself, `[short]` ends after two words.
    """

    def __init__(self, prompt: Sequence[int], tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
        text = decode(prompt, skip_special=False)
        self._chat = IM_START in prompt
        said = text.rsplit("<|im_start|>user\n", 1)[-1]
        self._split = "[halves]" in said
        self._least, self._most = (2, 2) if "[short]" in said else (6, 48)
        if "[long]" in said:
            self._least = self._most = 1 << 60
        self._forced: deque[int] = deque()
        self._phases: deque[str] = deque()
        if "[think]" in said and not text.endswith("</think>"):
            self._phases.append("think")
        tool = _tool(tools, tool_choice, wanted="[tool]" in said)
        self._tail: list[int] = []
        if tool is not None:
            self._head, self._tail = tool
            self._phases.append("tool")
        else:
            self._phases.append("text")
        self._words = -1

    def next(self, draw: int, *, may_end: bool) -> int:
        """The next token. With `may_end` off it is a word where an end would be due."""
        if self._forced:
            return self._forced.popleft()
        if not self._phases:
            return EOS if may_end else self._word(draw)
        phase = self._phases[0]
        if self._words < 0:
            self._words = 0
            if phase == "think":
                return THINK
            if phase == "tool":
                self._forced.extend(self._head)
                return TOOL_CALL
        limit = 6 if phase != "text" else self._most
        least = 3 if phase != "text" else self._least
        if self._words >= limit or (self._words >= least and draw // 997 % 9 == 0):
            return self._close(phase, draw, may_end=may_end)
        return self._word(draw)

    def _close(self, phase: str, draw: int, *, may_end: bool) -> int:
        if phase == "text":
            return EOS if may_end else self._word(draw)
        self._phases.popleft()
        self._words = -1
        if phase == "think":
            return END_THINK
        self._forced.extend([*self._tail[1:], END_TOOL_CALL])
        return self._tail[0]

    def _word(self, draw: int) -> int:
        first = self._words == 0 and self._chat
        self._words += 1
        words = FIRST_WORDS if first else LATER_WORDS
        word = words[draw % len(words)]
        if self._split and self._words % 2 == 0:
            word, rest = halves(word)
            self._forced.append(rest)
        return word


def _tool(tools: list[dict[str, Any]] | None, choice: Any, *, wanted: bool) -> tuple[list[int], list[int]] | None:
    """The tokens before and after the words of a tool call, or None if no tool is called."""
    if not tools or choice == "none":
        return None
    function = tools[0]["function"]
    if isinstance(choice, dict):
        function = next(t["function"] for t in tools if t["function"]["name"] == choice["function"]["name"])
    elif choice != "required" and not wanted:
        return None
    properties = (function.get("parameters") or {}).get("properties") or {"q": {}}
    name, key = json.dumps(function["name"]), json.dumps(next(iter(properties)))
    return encode(f'{{"name": {name}, "arguments": {{{key}: "'), encode('"}}')
