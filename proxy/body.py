"""A JSON object of which only the members that matter are read, and the rest stays as it came.

Agents send up to megabytes a turn. The members' values are kept as the bytes they came in, so nothing
is printed that was not changed, and numbers and unknown fields reach the engine as they were sent.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

from router.kv_params import Members

_Value = TypeVar("_Value")
_decode = msgspec.json.Decoder(Members).decode
_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)
"""To find out what values of a kind look like takes longer than to read a short one."""

NULL = msgspec.Raw(b"null")
"""What a member is whose value is not there."""


class NotAnObject(ValueError):
    """The bytes are not a JSON object; the message says what they are."""


def parse(data: bytes) -> Members:
    """Raises ``NotAnObject``. Of a member that is there twice the last one counts, as in the engine."""
    try:
        return _decode(data)
    except msgspec.ValidationError as error:
        raise NotAnObject("it is no JSON object") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotAnObject(f"it is malformed JSON: {error}") from error


def read(members: Members, name: str, kind: type[_Value]) -> _Value | None:
    """Member ``name`` if it is there and a ``kind``, else None: what is wrong with it the engine tells best."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        value: _Value = _decoder(kind).decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return value


def raw(value: object) -> msgspec.Raw:
    """``value`` as the bytes of a member."""
    return msgspec.Raw(msgspec.json.encode(value))


def dump(members: Members) -> bytes:
    """The object as JSON."""
    return msgspec.json.encode(members)
