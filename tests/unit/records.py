"""Entries for tests."""

from typing import Any

from metadata_store import Record
from router.fingerprint import Fingerprint


def record(deadline: float, turn: int = 1, **changes: Any) -> Record:
    """An entry as a turn leaves it, different for every ``turn``."""
    usual: dict[str, Any] = {
        "worker": "http://decode-0:8000",
        "generation": "1722.25",
        "params": b'{"remote_block_ids":[[1,2,3]],"remote_num_tokens":40,"\xc3\xa4":"\\u00e4"}',
        "fingerprint": Fingerprint(tokens=40, chain=bytes(range(48))),
        "model": "Qwen/Qwen3-32B",
        "stored_at": deadline - 470.125,
        "deadline": deadline,
        "turn": turn,
        "prefill": "http://prefill-1:8000",
    }
    return Record(**usual | changes)
