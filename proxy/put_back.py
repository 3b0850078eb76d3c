"""An entry that was taken and is not used: back into the store, or its blocks back to decode."""

from metadata_store import Record
from proxy.memory import Memory, Unavailable
from proxy.release import Releaser, Why


async def put_back(memory: Memory, releaser: Releaser, key: str, record: Record) -> None:
    """Have the store hold ``record`` again, as it was taken: nothing of it may have been sent to an engine.

    Where it surely is not stored, a newer entry being there or the store not asked, nobody else has it: its
    blocks are released. Where that is not sure, another turn may read them.
    """
    match await memory.restore(key, record):
        case False:
            releaser.release_record(record, Why.DISPLACED)
        case Unavailable(asked=False):
            releaser.release_record(record, Why.UNUSED)
