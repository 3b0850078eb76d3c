"""Faults that a test orders in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .recording import Recorded

Json = dict[str, Any]
Predicate = Callable[[Recorded], bool]

Point = Literal["before_headers", "before_answer", "after_headers", "mid_stream"]
"""Where a request is hung up or dropped.

- `before_headers`: the request was read and nothing was done about it;
- `before_answer`: everything was computed (and retained), and nothing was sent of it;
- `after_headers`: the status line and the headers were sent, and nothing after them;
- `mid_stream`: after `events` events of a stream, or half of the body of another answer.
"""


@dataclass
class Fault:
    """What will happen to the next request (or `times` requests) for which `when` holds."""

    kind: Literal["fail", "hang", "close", "error_event"]
    when: Predicate
    times: int = 1
    point: Point = "before_headers"
    events: int = 1
    status: int = 500
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    def at(self, point: Point) -> bool:
        return self.kind in ("hang", "close") and self.point == point


class Faults:
    """Ordered faults, first come first served; those whose condition does not hold are passed by."""

    def __init__(self) -> None:
        self._ordered: list[Fault] = []

    def order(self, fault: Fault) -> None:
        self._ordered.append(fault)

    def take(self, request: Recorded) -> Fault | None:
        for fault in self._ordered:
            if fault.when(request):
                fault.times -= 1
                if fault.times <= 0:
                    self._ordered.remove(fault)
                return fault
        return None

    def clear(self) -> None:
        self._ordered.clear()

    @property
    def pending(self) -> int:
        """Faults that have not happened yet."""
        return sum(fault.times for fault in self._ordered)
