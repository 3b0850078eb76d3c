"""Many streams at once through the command: each gets all of its answer.

`python -m bench.overhead.streams` is the full size.
"""

from __future__ import annotations

from bench.overhead.streams import Load, run

STREAMS = 300


async def test_every_one_of_many_streams_is_whole() -> None:
    result = await run(Load(STREAMS, tokens=10, seconds=0.2))
    assert not result.errors, str(result)
    assert len(result.outcomes) == STREAMS
    assert result.together > STREAMS // 2, str(result)
    assert result.running_after == 0


async def test_many_more_than_there_are_places_wait_and_are_all_served() -> None:
    result = await run(Load(STREAMS, tokens=4, seconds=0.05), "--max-turns-per-worker", "20")
    assert not result.errors, str(result)
    assert result.together < STREAMS // 2, str(result)
    assert result.running_after == 0
