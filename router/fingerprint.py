"""What tokens a worker holds, told without keeping the tokens.

A fingerprint is a chain of keyed digests, each of all tokens up to some place: after every 16 of about the last 2,048
tokens, after every 256 before those, and after the last. So an entry of 24k tokens takes 4 KB and a quarter of a
millisecond, reveals no token to whoever reads the store, and still tells how long a prefix it shares with any other
prompt: to 16 tokens where histories usually part, which is at the last answer, and to 256 where somebody edited them
further up.

The steps are ours and not the engine's block size: engines on CPU use blocks of 128 tokens, and a prefix
that ends inside a block can be reused (the last block is copied whole, its tail is computed again).
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import takewhile

import msgspec

STEP = 16
"""Tokens from one digest to the next, near the end."""

COARSE_STEP = 256
"""Tokens from one digest to the next before that."""

TAIL = 2048
"""Tokens at the end, at least, that are divided finely."""

DIGEST_BYTES = 16

_TOKEN = "I"
_TOKEN_BYTES = array(_TOKEN).itemsize


class Scope(msgspec.Struct, frozen=True):
    """What must be equal, besides the tokens, for KV to be the same: part of every digest."""

    secret: bytes
    model: str
    cache_salt: str


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of ``tokens`` tokens: one for each of the places that this number has (``_places``)."""

    tokens: int
    chain: bytes


def fingerprint(tokens: Sequence[int], scope: Scope) -> Fingerprint:
    """The fingerprint of ``tokens``.

    Raises ``OverflowError`` for a token id that is negative or does not fit in 32 bits.
    """
    packed = _pack(tokens)
    running = _begin(scope)
    digests = []
    done = 0
    for place in _places(len(tokens)):
        running.update(packed[done * _TOKEN_BYTES : place * _TOKEN_BYTES])
        digests.append(running.digest())
        done = place
    return Fingerprint(tokens=len(tokens), chain=b"".join(digests))


def common_prefix(held: Fingerprint, tokens: Sequence[int], scope: Scope) -> int:
    """How many tokens at the start of ``tokens`` are certainly the ones held.

    Either all that is held, or a multiple of ``STEP``; never more than the true common prefix, and less by fewer than
    ``STEP`` tokens, or ``COARSE_STEP`` before the tail of what is held.
    """
    try:
        packed = _pack(tokens[: held.tokens])
    except OverflowError:
        # Ids that a client made up: no worker holds such a token, so nothing is common from there on.
        tokens = list(takewhile(lambda token: 0 <= token < 2**32, tokens))
        packed = _pack(tokens[: held.tokens])
    if len(tokens) >= held.tokens and _digest(packed, scope) == held.chain[-DIGEST_BYTES:]:
        # The usual case in one pass: everything held begins the prompt.
        return held.tokens
    running = _begin(scope)
    common = 0
    for index, place in enumerate(_places(held.tokens)):
        running.update(packed[common * _TOKEN_BYTES : place * _TOKEN_BYTES])
        if place > len(tokens) or running.digest() != held.chain[index * DIGEST_BYTES :][:DIGEST_BYTES]:
            break
        common = place
    return common


class Outline(msgspec.Struct, frozen=True):
    """A fingerprint in short, a few bytes per thousand tokens: to count by, not to decide about reuse by."""

    tokens: int
    marks: bytes
    """The beginnings of the digests after every ``COARSE_STEP`` tokens, and after the last full ``STEP``."""


_MARK_BYTES = 8


def outline(held: Fingerprint) -> Outline:
    """``held`` in short."""
    tail = _tail(held.tokens)
    return Outline(held.tokens, b"".join([_mark(held, tail, place) for place in _marked(held.tokens)]))


def tokens_in_common(earlier: Outline, later: Fingerprint) -> int:
    """How many tokens at the start of both are the same: never too many, and fewer than ``COARSE_STEP`` too few.

    Fewer than ``STEP`` too few where ``later`` begins with all that ``earlier`` has and is not much longer.
    """
    common, tail = 0, _tail(later.tokens)
    for index, place in enumerate(_marked(earlier.tokens)):
        if earlier.marks[index * _MARK_BYTES : (index + 1) * _MARK_BYTES] != _mark(later, tail, place):
            break
        common = place
    return common


def _places(tokens: int) -> list[int]:
    """After which tokens a fingerprint of so many has a digest."""
    tail = _tail(tokens)
    places = [*range(COARSE_STEP, tail + 1, COARSE_STEP), *range(tail + STEP, tokens + 1, STEP)]
    return places if tokens % STEP == 0 else [*places, tokens]


def _tail(tokens: int) -> int:
    """Where the fine division begins."""
    return max(0, tokens - TAIL) // COARSE_STEP * COARSE_STEP


def _marked(tokens: int) -> list[int]:
    """After which tokens an outline of so many has a mark."""
    full = tokens // STEP * STEP
    return [*range(COARSE_STEP, full, COARSE_STEP), full] if full else []


def _mark(held: Fingerprint, tail: int, place: int) -> bytes:
    """Nothing if ``held``, whose tail begins at ``tail``, has no digest there."""
    if place > held.tokens or (place < tail and place % COARSE_STEP):
        return b""
    index = place // COARSE_STEP if place <= tail else tail // COARSE_STEP + (place - tail) // STEP
    return held.chain[(index - 1) * DIGEST_BYTES : (index - 1) * DIGEST_BYTES + _MARK_BYTES]


def _pack(tokens: Sequence[int]) -> bytes:
    return array(_TOKEN, tokens).tobytes()


def _digest(packed: bytes, scope: Scope) -> bytes:
    running = _begin(scope)
    running.update(packed)
    return running.digest()


def _begin(scope: Scope) -> "hashlib.blake2b":
    running = hashlib.blake2b(key=scope.secret, digest_size=DIGEST_BYTES, person=b"turnback-tokens")
    for part in (scope.model.encode(), scope.cache_salt.encode()):
        # Lengths first, so that no two scopes run together.
        running.update(len(part).to_bytes(4, "big"))
        running.update(part)
    return running
