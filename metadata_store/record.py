"""The entry: what a decode worker holds for one conversation, and how it is written down."""

import msgspec

from router.fingerprint import Fingerprint


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a decode worker retains after a turn, to be read once before ``deadline``."""

    worker: str
    """URL of the decode worker."""
    generation: str
    """Which start of that worker: blocks of an earlier one are gone."""
    params: bytes
    """The engine's ``kv_transfer_params``, as it sent them (JSON)."""
    fingerprint: Fingerprint
    """Of the tokens whose KV is held and known to us."""
    model: str
    stored_at: float
    """Seconds since the epoch at which decode's answer had arrived."""
    deadline: float
    """Seconds since the epoch after which the blocks must not be read any more."""
    turn: int
    """Number of the turn that left this, counted from 1."""
    prefill: str = ""
    """URL of the prefill worker of that turn, whose own prefix cache may still hold the prompt."""


class UnreadableRecord(ValueError):
    """Bytes in the store that are no entry of this version."""


def encode(record: Record) -> bytes:
    """As MessagePack; a few bytes more than the fingerprint and the block list."""
    return _encoder.encode(_Envelope(version=_VERSION, record=record))


def decode(data: bytes) -> Record:
    """Raises ``UnreadableRecord``, also for entries of another version: replicas may be of two versions."""
    try:
        envelope = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableRecord(str(error)) from error
    if envelope.version != _VERSION:
        raise UnreadableRecord(f"entry of version {envelope.version}, this is version {_VERSION}")
    return envelope.record


_VERSION = 1


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    record: Record


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)
