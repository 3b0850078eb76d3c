"""What all tests share: a real Redis server."""

from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer


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
