"""A conversation's entry: look at it, or end it and give its blocks back."""

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from metadata_store import Holding, Record
from metadata_store.keys import conversation_key
from proxy.call import Clock
from proxy.conversation import LONGEST_ID, credential
from proxy.errors import ApiError, bad_request
from proxy.ledger import Ledger
from proxy.memory import Memory, Unavailable
from proxy.pool import Pool
from proxy.probe import served_models
from proxy.release import Releaser, Why
from proxy.upstream import Answer, Upstream
from router.workers import Role

_MODELS_TIMEOUT = 10.0


class Conversations:
    """``GET`` and ``DELETE`` of ``/v1/conversations/{id}``: a caller's own, named as in its turns."""

    def __init__(
        self,
        secret: bytes,
        pool: Pool,
        upstream: Upstream,
        memory: Memory,
        ledger: Ledger,
        releaser: Releaser,
        clock: Clock,
    ) -> None:
        self._secret = secret
        self._pool = pool
        self._upstream = upstream
        self._memory = memory
        self._ledger = ledger
        self._releaser = releaser
        self._clock = clock

    def routes(self) -> APIRouter:
        """The endpoints. They raise ``ApiError``."""
        routes = APIRouter()

        @routes.get("/v1/conversations/{conversation:path}")
        async def look(request: Request, conversation: str, model: str | None = Query(None)) -> Response:
            """What decode holds for the conversation, one item a model."""
            keys = await self._keys(request, conversation, model)
            await self._ledger.look(self._memory.scan())
            found = [
                self._shown(name, holding)
                for name, key in keys.items()
                if (holding := self._ledger.find(key)) is not None
            ]
            return JSONResponse({"conversation": conversation, "retained": found}, 200 if found else 404)

        @routes.delete("/v1/conversations/{conversation:path}")
        async def delete(request: Request, conversation: str, model: str | None = Query(None)) -> Response:
            """Forget the conversation and give its blocks back to decode."""
            keys = await self._keys(request, conversation, model)
            released = 0
            for key in keys.values():
                taken = await self._memory.discard(key)
                if isinstance(taken, Unavailable):
                    raise ApiError(503, "The store does not answer.", kind="service_unavailable_error")
                if isinstance(taken, Record):
                    self._releaser.release_record(taken, Why.DELETED)
                    released += 1
            return JSONResponse({"conversation": conversation, "deleted": released > 0}, 200 if released else 404)

        return routes

    async def _keys(self, request: Request, conversation: str, model: str | None) -> dict[str, str]:
        """By model, where the caller's conversation would be; of all models that decode serves if none is named."""
        if not conversation or len(conversation) > LONGEST_ID:
            raise bad_request(f"A conversation id has 1 to {LONGEST_ID} characters.", "conversation")
        caller = credential(request.headers)
        names = [model] if model is not None else await self._models()
        return {name: conversation_key(self._secret, caller, name, conversation) for name in names}

    async def _models(self) -> list[str]:
        """What decode serves, and no name at all, as requests without a model have it."""
        names = {""}
        for worker in self._pool.all(Role.DECODE):
            answer = await self._upstream.get(worker, "/v1/models", _MODELS_TIMEOUT)
            if isinstance(answer, Answer):
                try:
                    names |= set(served_models(answer.body))
                except msgspec.DecodeError:
                    continue
        return sorted(names)

    def _shown(self, model: str, holding: Holding) -> dict[str, object]:
        now = self._clock()
        return {
            "model": model,
            "worker": holding.worker,
            "turn": holding.turn,
            "tokens": holding.tokens,
            "blocks": holding.blocks,
            "age_seconds": round(now - holding.stored_at, 3),
            "expires_in_seconds": round(holding.deadline - now, 3),
        }
