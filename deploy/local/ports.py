"""Ports of the loopback interface that nobody uses."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque
from collections.abc import Collection

LOOPBACK = "127.0.0.1"
# Below the range the kernel hands to outgoing connections: an engine binds its port half a minute
# after it was chosen, and by then a connection could have taken it.
RANGE = range(20_000, 32_000)
_KEPT = 200

_reservations: deque[contextlib.ExitStack] = deque()
_next = random.randrange(len(RANGE))


def free_port(taken: Collection[int] = (), beside: Collection[int] = ()) -> int:
    """A port that can be bound now, is not among `taken`, and that nobody else is given by this function.

    So are those that lie so far above it as `beside` says. They stay reserved, in all processes of this machine,
    until this process ends or has reserved 200 more times: there is time to hand them to a server, and to stop
    and start it. `OSError` if there is none.
    """
    global _next
    for _ in RANGE:
        first = RANGE[_next]
        _next = (_next + 1) % len(RANGE)
        ports = [first, *(first + distance for distance in beside)]
        if all(port in RANGE and port not in taken for port in ports) and _reserve(ports):
            return first
    raise OSError(f"no free port between {RANGE.start} and {RANGE.stop}")


def _reserve(ports: list[int]) -> bool:
    """Whether nobody uses these or had them reserved; now they are."""
    with contextlib.ExitStack() as reserved:
        for port in ports:
            # UDP has numbers of its own. Bound there, one tells other processes of it, is in nobody's way,
            # and is given back however the process ends.
            mark = reserved.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            try:
                mark.bind((LOOPBACK, port))
            except OSError:
                return False
            if not is_free(port):
                return False
        _reservations.append(reserved.pop_all())
    if len(_reservations) > _KEPT:
        _reservations.popleft().close()
    return True


def is_free(port: int) -> bool:
    """Whether a server could bind it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
