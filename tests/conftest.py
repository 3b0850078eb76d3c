"""What all tests share: a real Redis server."""

from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server_of_session() -> Iterator[RedisServer]:
    """Started by whoever needs it; see ``redis_server``."""
    server = RedisServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_server(redis_server_of_session: RedisServer) -> RedisServer:
    """A running, empty Redis server; a test may stop and start it."""
    redis_server_of_session.start()
    redis_server_of_session.clear()
    return redis_server_of_session


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """For ``--store``: a running, empty Redis server."""
    return redis_server.url
