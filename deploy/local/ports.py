"""Ports of the loopback interface that nobody uses."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

LOOPBACK = "127.0.0.1"
# Below the range the kernel hands to outgoing connections: an engine binds its port half a minute
# after it was chosen, and by then a connection could have taken it.
RANGE = range(20_000, 32_000)


def free_port(taken: Collection[int] = (), row: int = 1) -> int:
    """The first of `row` ports in a row that can be bound now and are not among `taken`."""
    for first in random.sample(RANGE, len(RANGE)):
        if all(port not in taken and is_free(port) for port in range(first, first + row)):
            return first
    raise OSError(f"no free port between {RANGE.start} and {RANGE.stop}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
