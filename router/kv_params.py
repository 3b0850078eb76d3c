"""The engine's ``kv_transfer_params``, read as far as Turnback must, passed on as they came.

New engine versions add fields; none is dropped or rewritten but those that say what to reuse. The
fields and their meaning are those of vLLM's NIXL connector.
"""

import msgspec

Members = dict[str, msgspec.Raw]
"""A JSON object whose members' values are kept as the bytes they came in."""


class _Known(msgspec.Struct, frozen=True):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_num_tokens: int = 0
    dcp_size: int = 1


_known = msgspec.json.Decoder(_Known).decode
_members = msgspec.json.Decoder(Members).decode


class MalformedParams(ValueError):
    """The engine's parameters are not of the form that any known version sends."""


class KvParams:
    """One engine's answer to "where are the blocks", for one finished request."""

    def __init__(self, raw: bytes | msgspec.Raw) -> None:
        """Raises ``MalformedParams``."""
        try:
            self._known = _known(raw)
            self._members = _members(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedParams(str(error)) from error
        self.raw = bytes(raw)

    @property
    def tokens(self) -> int:
        """How many tokens have KV on the worker that sent this."""
        return self._known.remote_num_tokens

    @property
    def blocks(self) -> int:
        """How many KV blocks the worker keeps for it."""
        return sum(map(len, self._known.remote_block_ids or []))

    @property
    def cuttable(self) -> bool:
        """Whether a prefix shorter than everything can be taken.

        Not with several KV cache groups (sliding window, Mamba), whose lists do not begin at the first
        token, nor when the context is spread over several ranks.
        """
        return len(self._known.remote_block_ids or []) == 1 and self._known.dcp_size == 1

    @property
    def readable(self) -> bool:
        """Whether the engine will read blocks by these: it ignores parameters that lack one of these fields.

        With several groups it fails the request if one of them has no block.
        """
        known = self._known
        return (
            bool(known.remote_block_ids)
            and all(known.remote_block_ids or [])
            and known.remote_num_tokens > 0
            and known.remote_engine_id is not None
            and known.remote_request_id is not None
            and known.remote_host is not None
            and known.remote_port is not None
        )

    def all_listed(self, block_size: int) -> bool:
        """Whether the block lists are certainly those of all that is held, block by block.

        A shorter one does not begin at the first token (a sliding window's), so it cannot be cut. Lists
        that are not cut must not be longer either, as blocks reserved ahead make them: the engine lines up
        the two sides' lists at their tails. The longest list is that of a group which keeps all blocks;
        another's length tells nothing. Over several ranks, one block in it stands for one on each; there
        lists are lined up at their heads, which goes wrong for a sliding window beside another group.
        """
        groups = self._known.remote_block_ids or []
        if len(groups) > 1 and self._known.dcp_size > 1:
            return False
        longest = max(map(len, groups), default=0)
        needed = _blocks(self.tokens, block_size * self._known.dcp_size)
        return longest >= needed if self.cuttable else longest == needed

    def whole(self) -> Members:
        """Members of a prefill leg that reuses all that is held."""
        return {**self._members, **_PREFILL_DIRECTION}

    def cut(self, tokens: int, block_size: int) -> Members:
        """Members of a prefill leg that reuses the first ``tokens`` tokens only.

        The block list is cut too: the engine lines up the two sides' lists at their tails, so a longer
        list would copy the wrong blocks.
        """
        if not self.cuttable:
            raise ValueError("these parameters cannot be cut to a prefix")
        blocks = (self._known.remote_block_ids or [[]])[0][: _blocks(tokens, block_size)]
        return self.whole() | {
            "remote_num_tokens": _raw(tokens),
            "remote_block_ids": _raw([blocks]),
        }

    def nothing(self) -> Members:
        """Members of a request that reads no block and thereby tells the holder to free them all."""
        groups: list[list[int]] = [[] for _ in self._known.remote_block_ids or [[]]]
        return self.whole() | {"remote_num_tokens": _raw(0), "remote_block_ids": _raw(groups)}


def first_turn() -> Members:
    """Members of a prefill leg that has nothing to reuse: keep the blocks for a decode worker to read."""
    return dict(_FIRST_TURN)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


_PREFILL_DIRECTION: Members = {"do_remote_decode": _raw(True), "do_remote_prefill": _raw(False)}

_FIRST_TURN: Members = _PREFILL_DIRECTION | {
    name: _raw(None) for name in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
}
