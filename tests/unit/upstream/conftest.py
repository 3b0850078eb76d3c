"""What asks workers is tried on both event loops: uvloop is the router's own, asyncio's is the tests'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
async def complaints() -> AsyncIterator[list[str]]:
    """What the event loop had to complain about, such as an exception that nobody looked at: nothing."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(str(context)))
    yield heard
    assert not heard
