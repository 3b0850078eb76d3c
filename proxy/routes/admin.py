"""Workers added and drained by hand, for who has the admin key."""

import secrets
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr, TypeAdapter, ValidationError

from proxy.departures import Departures
from proxy.errors import ApiError, bad_request
from proxy.ledger import Ledger
from proxy.memory import Memory
from proxy.pool import LastWorker, Pool
from proxy.settings import Settings
from proxy.worker_spec import WorkerSpec
from router.workers import Role, Worker

_roles = TypeAdapter(Role)
_specs = TypeAdapter(WorkerSpec)


class Admin:
    """``GET``, ``POST`` and ``DELETE`` of ``/admin/workers``. What they change, this process alone knows of."""

    def __init__(self, settings: Settings, pool: Pool, departures: Departures, memory: Memory, ledger: Ledger) -> None:
        self._settings = settings
        self._pool = pool
        self._departures = departures
        self._memory = memory
        self._ledger = ledger

    def routes(self) -> APIRouter:
        """The endpoints. They raise ``ApiError``; without the setting ``admin_key`` that is 404, always."""
        routes = APIRouter(prefix="/admin", dependencies=[Depends(self._authorize)])

        @routes.get("/workers")
        async def look() -> JSONResponse:
            """All workers, and what is retained on them."""
            await self._ledger.look(self._memory.scan())
            return self._shown([worker for role in Role for worker in self._pool.all(role)], 200)

        @routes.post("/workers")
        async def add(request: Request) -> JSONResponse:
            """Add the worker that the body names as the config file does, with its role; or take back one that drains.

            201 if it is new, 200 if it was there.
            """
            self._refuse_if_several()
            members = _object(await request.body())
            role, spec = _named(members)
            (other,) = (one for one in Role if one is not role)
            if self._pool.at(other, spec.url):
                raise _conflict(f"{spec.url} is a {other} worker; a worker reads from others, not from itself.")
            known = self._pool.spec(role, spec.url)
            if known is not None and any(
                getattr(spec, name) != getattr(known, name) for name in members.keys() - {"role"}
            ):
                raise _conflict(
                    f"{spec.url} is in the pool with another size or key; drain it, and add it when it left."
                )
            self._pool.add(role, spec)
            return self._shown(self._pool.at(role, spec.url), 201 if known is None else 200)

        @routes.delete("/workers")
        async def drain(
            request: Request,
            role: str | None = Query(None),
            url: str | None = Query(None),
            now: bool = Query(False),
        ) -> JSONResponse:
            """Give the worker that the query, or the body, names no new work, and remove it when nobody needs it.

            With ``now`` what it retains is given back rather than waited for.
            """
            self._refuse_if_several()
            body = await request.body()
            members = _object(body) if body else {}
            members |= {name: value for name, value in (("role", role), ("url", url)) if value is not None}
            which, spec = _named(members)
            try:
                found = self._departures.begin(which, spec.url)
            except LastWorker as error:
                raise _conflict(f"{error}; add another first.") from error
            if not found:
                raise ApiError(404, f"There is no {which} worker {spec.url}.", kind="not_found_error", param="url")
            if now:
                self._departures.hurry(which, spec.url)
            return self._shown(self._pool.at(which, spec.url), 202)

        return routes

    async def _authorize(self, request: Request) -> None:
        key: SecretStr | None = self._settings.admin_key
        if key is None:
            raise ApiError(404, "Not Found", kind="not_found_error")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = secrets.compare_digest(given.encode("latin-1"), key.get_secret_value().encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(401, "The admin key is missing or wrong.", kind="authentication_error")

    def _refuse_if_several(self) -> None:
        if self._settings.workers > 1:
            raise _conflict(
                "This would reach one of several processes (setting workers) only: change the config file instead,"
                " which all of them watch."
            )

    def _shown(self, workers: list[Worker], status: int) -> JSONResponse:
        return JSONResponse({"workers": [self._worker(worker) for worker in workers]}, status)

    def _worker(self, worker: Worker) -> dict[str, object]:
        retained = self._ledger.on(worker.name, worker.generation) if worker.role is Role.DECODE else {}
        return {
            "worker": worker.name,
            "role": worker.role,
            "url": worker.url,
            "rank": worker.rank,
            "up": worker.up,
            "draining": worker.draining,
            "in_flight": worker.in_flight,
            "generation": worker.generation,
            "retained": {
                "conversations": len(retained),
                "tokens": sum(holding.tokens for holding in retained.values()),
            },
        }


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not usable: {error}.") from error


def _named(members: dict[str, Any]) -> tuple[Role, WorkerSpec]:
    """The role, and the worker by its URL. Raises ``ApiError`` (400) that names the member at fault."""
    others = {name: value for name, value in members.items() if name != "role"}
    try:
        return _roles.validate_python(members.get("role")), _specs.validate_python(others)
    except ValidationError as error:
        found = error.errors()[0]
        param = ".".join(str(part) for part in found["loc"]) or "role"
        raise bad_request(f"{param}: {found['msg'].removeprefix('Value error, ')}.", param) from None


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, kind="conflict_error")
