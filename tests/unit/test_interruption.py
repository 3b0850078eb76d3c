"""A turn ends when its client leaves or its time is over, but never in the middle of what must not be cut."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from proxy.drain import Drain
from proxy.interruption import Cause, Interruption
from tests.running import GENEROUS

Turn = Callable[[Interruption], Awaitable[str]]


class Served:
    """A task that serves a turn as the endpoints do."""

    def __init__(self, turn: Turn, seconds: float = GENEROUS) -> None:
        self.interruption = Interruption(seconds)
        self._turn = turn
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> str:
        with self.interruption:
            try:
                return await self._turn(self.interruption)
            except asyncio.CancelledError:
                if not self.interruption.was_it():
                    raise
                # What follows can wait like anything else.
                await asyncio.sleep(0)
                return f"ended: {self.interruption.cause and self.interruption.cause.value}"

    async def result(self) -> str:
        return await asyncio.wait_for(self.task, GENEROUS)


async def forever(interruption: Interruption) -> str:
    await asyncio.Event().wait()
    return "never"


async def begun() -> None:
    """Long enough for a task to have come to its first wait."""
    await asyncio.sleep(0)


async def test_a_client_that_leaves_ends_its_turn() -> None:
    turn = Served(forever)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    assert await turn.result() == "ended: client left"


async def test_a_turn_whose_time_is_over_ends() -> None:
    assert await Served(forever, seconds=0.01).result() == "ended: time is over"


async def test_only_the_first_reason_counts() -> None:
    turn = Served(forever)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    turn.interruption.interrupt(Cause.TIME_IS_OVER)
    assert await turn.result() == "ended: client left"
    assert turn.task.cancelling() == 0


async def test_what_is_uncut_ends_first_and_its_result_is_not_lost() -> None:
    gate, got = asyncio.Event(), []

    async def work() -> str:
        await gate.wait()
        return "taken"

    async def serve(interruption: Interruption) -> str:
        got.append(await interruption.uncut(work()))
        # Right after it nothing is raised, so that the result can be dealt with.
        got.append("dealt with")
        await asyncio.Event().wait()
        return "never"

    turn = Served(serve)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    await begun()
    assert got == []
    gate.set()
    assert await turn.result() == "ended: client left"
    assert got == ["taken", "dealt with"]


async def test_what_is_uncut_within_another_is_not_cut_either() -> None:
    gate, order = asyncio.Event(), []

    async def serve(interruption: Interruption) -> str:
        async def outer() -> None:
            await interruption.uncut(gate.wait())
            await asyncio.sleep(0)
            order.append("outer ended")

        await interruption.uncut(outer())
        await asyncio.Event().wait()
        return "never"

    turn = Served(serve)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    gate.set()
    assert await turn.result() == "ended: client left"
    assert order == ["outer ended"]


async def test_what_is_uncut_is_not_cut_by_an_interruption_that_was_on_its_way() -> None:
    """What asks workers gives an answer that came together with it, and has it raised later."""
    stored: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        stored.append("stored")

    async def serve(interruption: Interruption) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            task.uncancel()
        await interruption.uncut(work())
        stored.append("went on")
        await asyncio.Event().wait()
        return "never"

    turn = Served(serve)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    assert await turn.result() == "ended: client left"
    assert stored == ["stored", "went on"]
    assert turn.task.cancelling() == 0


async def test_what_is_uncut_may_fail_and_then_the_turn_ends_all_the_same() -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        raise OSError("the store is gone")

    async def serve(interruption: Interruption) -> str:
        with pytest.raises(OSError, match="the store is gone"):
            await interruption.uncut(work())
        await asyncio.Event().wait()
        return "never"

    turn = Served(serve)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    gate.set()
    assert await turn.result() == "ended: client left"


async def test_nothing_happens_to_a_task_whose_turn_is_over() -> None:
    async def at_once(interruption: Interruption) -> str:
        return "served"

    turn = Served(at_once)
    assert await turn.result() == "served"
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    assert turn.interruption.cause is None
    assert turn.task.cancelling() == 0


@pytest.mark.parametrize("cause", [Cause.CLIENT_LEFT, None])
async def test_somebody_elses_cancellation_goes_on(cause: Cause | None) -> None:
    """Also where it comes on top of ours."""
    turn = Served(forever)
    await begun()
    if cause is not None:
        turn.interruption.interrupt(cause)
    turn.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn.result()


async def test_somebody_elses_cancellation_cuts_even_that() -> None:
    """A process that ends waits for nobody; ours, which was to come after it, does not hide it."""

    async def serve(interruption: Interruption) -> str:
        await interruption.uncut(asyncio.Event().wait())
        return "never"

    turn = Served(serve)
    await begun()
    turn.interruption.interrupt(Cause.CLIENT_LEFT)
    turn.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn.result()


async def test_a_process_that_ends_shortens_the_turns_that_run_and_those_that_come() -> None:
    drain = Drain()
    running, short, late = Served(forever), Served(forever, seconds=0.01), Served(forever)
    await begun()
    drain.enter(running.interruption)
    drain.enter(short.interruption)
    drain.begin(0.05)
    drain.enter(late.interruption)
    assert drain.running == 3
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await short.result() == "ended: time is over"
    assert await running.result() == await late.result() == "ended: time is over"
    assert loop.time() - began < GENEROUS / 2
    for turn in (running, short, late):
        drain.leave(turn.interruption)
    assert drain.running == 0


async def test_a_turn_that_is_over_leaves_nothing_with_the_loop() -> None:
    """Its limit may be an hour away."""

    async def at_once(interruption: Interruption) -> str:
        return "served"

    turn = Served(at_once, seconds=3600)
    await turn.result()
    kept = weakref.ref(turn.interruption)
    del turn
    gc.collect()
    assert kept() is None
