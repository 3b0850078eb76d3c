"""What all tests share: a real Redis server, and how examples are generated."""

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_server import RedisServer, Start

# Machines are noisy: how long an example takes says nothing of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    """Started by whoever needs it; see ``redis_server``."""
    server = RedisServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_server(redis_process: RedisServer) -> RedisServer:
    """A running, empty Redis server; a test may stop and start it."""
    redis_process.start()
    redis_process.clear()
    return redis_process


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """For ``--store``: a running, empty Redis server."""
    return redis_server.url


@pytest.fixture
def start_redis() -> Iterator[Start]:
    """Starts further servers, which end with the test."""
    with contextlib.ExitStack() as ending:

        def start(*options: str, persistent: bool = False) -> RedisServer:
            server = RedisServer(*options, persistent=persistent)
            ending.callback(server.close)
            server.start()
            return server

        yield start
