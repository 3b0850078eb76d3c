"""What an engine was sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from multidict import CIMultiDict

Json = dict[str, Any]


@dataclass(eq=False)
class Recorded:
    """One request as it came, and what became of it.

    `status` is None until headers are sent; `aborted` says that the client hung up first.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    raw: bytes
    status: int | None = None
    aborted: bool = False
    request_ids: list[str] = field(default_factory=list)
    """Ids of the engine requests it became, as in `remote_request_id`."""

    @property
    def json(self) -> Json:
        """The body as an object; an error if it is none."""
        body = json.loads(self.raw)
        if not isinstance(body, dict):
            raise TypeError("not an object")
        return body

    @property
    def kv(self) -> Json | None:
        """The `kv_transfer_params` that were sent, if any."""
        params = self.json.get("kv_transfer_params")
        return params if isinstance(params, dict) else None

    @property
    def is_prefill(self) -> bool:
        """Whether this was a prefill leg."""
        return bool(self.kv and self.kv.get("do_remote_decode"))

    @property
    def is_decode(self) -> bool:
        """Whether this was a decode leg."""
        return bool(self.kv and self.kv.get("do_remote_prefill"))

    @property
    def is_release(self) -> bool:
        """Whether this was a request that only gives retained blocks back."""
        kv = self.kv
        if not kv or not self.is_prefill or not kv.get("remote_block_ids"):
            return False
        return not kv.get("remote_num_tokens") and not any(kv["remote_block_ids"])
