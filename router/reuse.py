"""Whether, and how much of, what a decode worker holds may stand for the beginning of a new prompt.

The engine takes ``min(remote_num_tokens, len(prompt))`` tokens as computed without looking at them.
This module is the look: nothing is reused that was not found equal, token by token.
"""

from collections.abc import Sequence

import msgspec

from metadata_store.record import Record
from router.fingerprint import Scope, common_prefix
from router.kv_params import KvParams, MalformedParams, Members
from router.words import Word
from router.workers import Worker


class Outcome(Word):
    """What became of reuse in a turn. The same words in the metric, the response header and the log."""

    HIT = "hit"
    PARTIAL = "partial"
    FIRST = "first"
    NONE = "none"
    DIVERGED = "diverged"
    EXPIRED = "expired"
    STALE = "stale"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    OFF = "off"


class Reason(Word):
    """Why an outcome is what it is, where the outcome alone does not say."""

    ALL_HELD = "all_held"
    COMMON_PREFIX = "common_prefix"
    NOTHING_RETAINED = "nothing_retained"
    NO_CONVERSATION_ID = "no_conversation_id"
    REUSE_OFF = "reuse_off"
    OTHER_TOKENS = "other_tokens"
    PAST_DEADLINE = "past_deadline"
    WORKER_GONE = "worker_gone"
    WORKER_DOWN = "worker_down"
    WORKER_RESTARTED = "worker_restarted"
    ROLE_DOWN = "role_down"
    BELOW_THRESHOLD = "below_threshold"
    NO_TOKEN_IDS = "no_token_ids"
    BLOCK_SIZE = "block_size"
    MALFORMED_PARAMS = "malformed_params"
    MEDIA = "media"
    SEVERAL_ANSWERS = "several_answers"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    TRUNCATION = "truncation"
    STORE_UNAVAILABLE = "store_unavailable"
    PREFILL_ERROR = "prefill_error"
    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_OTHER_TOKENS = "prefill_other_tokens"
    PREFILL_WITHOUT_PARAMS = "prefill_without_params"
    DECODE_ERROR = "decode_error"
    DECODE_OTHER_TOKENS = "decode_other_tokens"
    WORKER_ERROR = "worker_error"


class Reuse(msgspec.Struct, frozen=True):
    """The verified part of what is held: the first ``tokens`` tokens of the prompt."""

    outcome: Outcome
    reason: Reason
    tokens: int
    params: Members
    """Members of the prefill leg's ``kv_transfer_params``."""


class NoReuse(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: Reason


class Conditions(msgspec.Struct, frozen=True):
    """What, besides the tokens, decides about reuse."""

    now: float
    """Seconds since the epoch."""
    scope: Scope
    min_tokens: int
    """The engine's ``kv_recompute_threshold``: it computes fewer tokens than this itself."""


def holder_state(record: Record, holder: Worker | None, now: float) -> NoReuse | None:
    """Why what ``record`` tells of cannot be there any more; None if it should be.

    ``holder`` is the worker that the record names, None if it is not in the pool any more.
    """
    if now >= record.deadline:
        return NoReuse(Outcome.EXPIRED, Reason.PAST_DEADLINE)
    if holder is None:
        return NoReuse(Outcome.STALE, Reason.WORKER_GONE)
    if holder.generation != record.generation:
        return NoReuse(Outcome.STALE, Reason.WORKER_RESTARTED)
    if holder.health.down:
        return NoReuse(Outcome.STALE, Reason.WORKER_DOWN)
    return None


def decide(
    record: Record, prompt: Sequence[int], holder: Worker | None, prefill: Worker, conditions: Conditions
) -> Reuse | NoReuse:
    """What of ``record`` a prefill of ``prompt`` on ``prefill`` may take as computed.

    Whatever is sent by the result's ``params``, the engine treats as computed only tokens that are equal
    to the prompt's, position by position, and computes at least the prompt's last token itself.
    """
    gone = holder_state(record, holder, conditions.now)
    if gone is not None or holder is None:
        return gone or NoReuse(Outcome.STALE, Reason.WORKER_GONE)
    try:
        params = KvParams(record.params)
    except MalformedParams:
        return NoReuse(Outcome.UNSUPPORTED, Reason.MALFORMED_PARAMS)
    block_size = _shared_block_size(holder, prefill)
    if block_size is None:
        return NoReuse(Outcome.UNSUPPORTED, Reason.BLOCK_SIZE)

    common = common_prefix(record.fingerprint, prompt, conditions.scope)
    tokens = min(common, len(prompt) - 1, params.tokens)
    whole = tokens == params.tokens
    if not whole and not params.cuttable:
        return NoReuse(Outcome.DIVERGED, Reason.OTHER_TOKENS)
    if tokens < conditions.min_tokens or tokens < 1:
        if whole or common == record.fingerprint.tokens:
            return NoReuse(Outcome.UNSUPPORTED, Reason.BELOW_THRESHOLD)
        return NoReuse(Outcome.DIVERGED, Reason.OTHER_TOKENS)
    if not params.readable or not params.all_listed(block_size):
        return NoReuse(Outcome.UNSUPPORTED, Reason.MALFORMED_PARAMS)
    # The list may be longer than the tokens need (blocks reserved ahead), so it is cut for a whole hit too.
    members = params.cut(tokens, block_size) if params.cuttable else params.whole()
    if whole:
        return Reuse(Outcome.HIT, Reason.ALL_HELD, tokens, members)
    return Reuse(Outcome.PARTIAL, Reason.COMMON_PREFIX, tokens, members)


def _shared_block_size(holder: Worker, prefill: Worker) -> int | None:
    """Tokens per block where both workers agree; a cut list of blocks has no sure meaning otherwise."""
    if holder.capabilities is None or prefill.capabilities is None:
        return None
    block_size = holder.capabilities.block_size
    return block_size if block_size and block_size == prefill.capabilities.block_size else None


def known_tokens(
    params: KvParams, prompt: Sequence[int] | None, everything: Sequence[int] | None
) -> Sequence[int] | None:
    """Which tokens a decode worker holds after an answer, from its first on; None if that is not certain.

    ``prompt`` are the prompt's ids as decode told them, ``everything`` those and the generated ones. The
    last generated token has no KV yet. Where the count does not come out so, some ids were not told, and
    only the prompt's are certain.
    """
    if everything is not None and params.tokens == len(everything) - 1:
        return everything[: params.tokens]
    if prompt is not None and params.tokens >= len(prompt) and params.cuttable:
        return prompt
    return None
