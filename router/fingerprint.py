"""What tokens a worker holds, told without keeping the tokens.

A fingerprint is a chain of keyed digests: the k-th one covers the first ``16 k`` tokens, the last one
all of them. So an entry of 24k tokens takes 24 KB, reveals no token to whoever reads the store, and
still tells how long a prefix it shares with any other prompt, to 16 tokens.

The step is ours and not the engine's block size: engines on CPU use blocks of 128 tokens, and a prefix
that ends inside a block can be reused (the last block is copied whole, its tail is computed again).
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import takewhile

import msgspec

STEP = 16
"""Tokens per digest."""

DIGEST_BYTES = 16

_TOKEN = "I"
_TOKEN_BYTES = array(_TOKEN).itemsize


class Scope(msgspec.Struct, frozen=True):
    """What must be equal, besides the tokens, for KV to be the same: part of every digest."""

    secret: bytes
    model: str
    cache_salt: str


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of ``tokens`` tokens: one per full step, and one more where the last step is not full."""

    tokens: int
    chain: bytes


def fingerprint(tokens: Sequence[int], scope: Scope) -> Fingerprint:
    """The fingerprint of ``tokens``.

    Raises ``OverflowError`` for a token id that is negative or does not fit in 32 bits.
    """
    packed = _pack(tokens)
    running = _begin(scope)
    chain = bytearray()
    step = STEP * _TOKEN_BYTES
    for start in range(0, len(packed), step):
        running.update(packed[start : start + step])
        chain += running.copy().digest()
    return Fingerprint(tokens=len(tokens), chain=bytes(chain))


def common_prefix(held: Fingerprint, tokens: Sequence[int], scope: Scope) -> int:
    """How many tokens at the start of ``tokens`` are certainly the ones held.

    Either all that is held, or a multiple of ``STEP``; never more than the true common prefix.
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
    step = STEP * _TOKEN_BYTES
    common = 0
    for index in range(min(held.tokens, len(tokens)) // STEP):
        running.update(packed[index * step : (index + 1) * step])
        if running.copy().digest() != held.chain[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            break
        common += STEP
    return common


class Outline(msgspec.Struct, frozen=True):
    """A fingerprint in short, a few bytes per thousand tokens: to count by, not to decide about reuse by."""

    tokens: int
    marks: bytes
    """The beginnings of the digests of every ``STEPS_PER_MARK``-th step, and of the last full one."""


STEPS_PER_MARK = 16

_MARK_BYTES = 8


def outline(held: Fingerprint) -> Outline:
    """``held`` in short."""
    return Outline(held.tokens, b"".join(_mark(held, steps) for steps in _marked(held.tokens)))


def tokens_in_common(earlier: Outline, later: Fingerprint) -> int:
    """How many tokens at the start of both are the same: never too many, and at most 255 too few.

    At most 15 too few where ``later`` begins with all that ``earlier`` has.
    """
    common = 0
    for index, steps in enumerate(_marked(earlier.tokens)):
        mark = earlier.marks[index * _MARK_BYTES : (index + 1) * _MARK_BYTES]
        if steps * STEP > later.tokens or mark != _mark(later, steps):
            break
        common = steps * STEP
    return common


def _marked(tokens: int) -> list[int]:
    """After which steps an outline of so many tokens has marks."""
    full = tokens // STEP
    return [*range(STEPS_PER_MARK, full, STEPS_PER_MARK), full] if full else []


def _mark(held: Fingerprint, steps: int) -> bytes:
    return held.chain[(steps - 1) * DIGEST_BYTES : (steps - 1) * DIGEST_BYTES + _MARK_BYTES]


def _pack(tokens: Sequence[int]) -> memoryview:
    return memoryview(array(_TOKEN, tokens)).cast("B")


def _digest(packed: memoryview, scope: Scope) -> bytes:
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
