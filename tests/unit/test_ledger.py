"""What is known of retained entries: exact for this process, whatever a look at the store sees meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from metadata_store import Holding
from proxy.ledger import Ledger
from tests.unit.records import record

NOW = 1_000.0


def holding(turn: int = 1, blocks: int = 10, stored_at: float = NOW - 1, seconds: float = 400) -> Holding:
    return Holding.of(record(NOW + seconds, turn, worker="d", generation="1", blocks=blocks, stored_at=stored_at))


async def scan(found: dict[str, Holding], meanwhile: Callable[[], None]) -> AsyncIterator[tuple[str, Holding]]:
    """A scan of the store that has read all of ``found`` when ``meanwhile`` happens."""
    for key, held in found.items():
        yield key, held
    meanwhile()


async def test_an_entry_put_back_during_a_look_is_not_forgotten() -> None:
    ledger, old = Ledger(lambda: NOW), holding(stored_at=NOW - 60)
    await ledger.look(scan({}, lambda: ledger.stored("key", old)))
    assert ledger.find("key") == old
    assert ledger.blocks_on("d", "1") == 10


async def test_an_entry_taken_during_a_look_does_not_come_back() -> None:
    ledger, held = Ledger(lambda: NOW), holding()
    ledger.stored("key", held)
    await ledger.look(scan({"key": held}, lambda: ledger.gone("key")))
    assert ledger.find("key") is None
    assert ledger.blocks_on("d", "1") == 0


async def test_an_entry_replaced_during_a_look_is_the_new_one() -> None:
    ledger, new = Ledger(lambda: NOW), holding(2, blocks=25)
    await ledger.look(scan({"key": holding()}, lambda: ledger.stored("key", new)))
    assert ledger.find("key") == new
    assert ledger.blocks_on("d", "1") == 25


async def test_a_look_finds_what_others_stored_and_took() -> None:
    ledger, theirs = Ledger(lambda: NOW), holding(2)
    ledger.stored("taken by another", holding())
    await ledger.look(scan({"theirs": theirs}, lambda: None))
    assert ledger.on("d", "1") == {"theirs": theirs}
    assert ledger.blocks_on("d", "1") == 10


def test_blocks_count_until_their_deadline() -> None:
    now = NOW
    ledger = Ledger(lambda: now)
    ledger.stored("key", holding())
    ledger.stored("key", holding(2, seconds=500))
    now = NOW + 450
    assert ledger.blocks_on("d", "1") == 10
    now = NOW + 500
    assert ledger.blocks_on("d", "1") == 0
