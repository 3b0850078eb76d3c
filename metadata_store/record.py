"""The entry: what a decode worker holds for one conversation, and how it is written down."""

from typing import TypeVar

import msgspec

from router.fingerprint import Fingerprint, Outline, outline


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a decode worker retains after a turn, to be read once before ``deadline``."""

    worker: str
    """Name of the decode worker: its URL, and its rank if it has one."""
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
    blocks: int = 0
    """How many of the worker's KV blocks are kept for it."""
    prefill: str = ""
    """Name of the prefill worker of that turn, whose own prefix cache may still hold the prompt."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """What there is to know of an entry without reading it: whose memory it takes, how much, since when."""

    worker: str
    generation: str
    tokens: int
    blocks: int
    turn: int
    stored_at: float
    """Seconds since the epoch."""
    deadline: float
    """Seconds since the epoch."""

    @classmethod
    def of(cls, record: Record) -> "Holding":
        """The same entry, in short."""
        return cls(
            worker=record.worker,
            generation=record.generation,
            tokens=record.fingerprint.tokens,
            blocks=record.blocks,
            turn=record.turn,
            stored_at=record.stored_at,
            deadline=record.deadline,
        )


class LastTurn(msgspec.Struct, frozen=True, array_like=True):
    """When a conversation was last answered and what had been computed by then, whatever became of the blocks.

    Only counted by: it tells the pause, and what a later turn computes again.
    """

    ended_at: float
    """Seconds since the epoch."""
    computed: Outline

    @classmethod
    def of(cls, record: Record) -> "LastTurn":
        """The turn that left ``record``."""
        return cls(record.stored_at, outline(record.fingerprint))


class Put(msgspec.Struct, frozen=True):
    """What was in the store before an entry was put there."""

    displaced: Record | None
    """The entry in its place: nobody else can get it any more, so its blocks can be released."""
    before: LastTurn | None


class UnreadableRecord(ValueError):
    """Bytes in the store that are no entry of this version."""


def encode(record: Record) -> bytes:
    """As MessagePack; a few bytes more than the fingerprint and the block list."""
    return _encoder.encode((_VERSION, record))


def decode(data: bytes) -> Record:
    """Raises ``UnreadableRecord``, also for entries of another version: replicas may be of two versions."""
    return _read(data, _records)


def encode_holding(holding: Holding) -> bytes:
    """As MessagePack, about a hundred bytes."""
    return _encoder.encode((_VERSION, holding))


def decode_holding(data: bytes) -> Holding:
    """Raises ``UnreadableRecord``."""
    return _read(data, _holdings)


def encode_last_turn(last: LastTurn) -> bytes:
    """As MessagePack, about 8 bytes for every 256 tokens."""
    return _encoder.encode((_VERSION, last))


def decode_last_turn(data: bytes) -> LastTurn:
    """Raises ``UnreadableRecord``."""
    return _read(data, _last_turns)


_VERSION = 2

_Content = TypeVar("_Content")


def _read(data: bytes, decoder: "msgspec.msgpack.Decoder[tuple[int, _Content]]") -> _Content:
    try:
        version, content = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableRecord(str(error)) from error
    if version != _VERSION:
        raise UnreadableRecord(f"entry of version {version}, this is version {_VERSION}")
    return content


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(tuple[int, Record])
_last_turns = msgspec.msgpack.Decoder(tuple[int, LastTurn])
_holdings = msgspec.msgpack.Decoder(tuple[int, Holding])
