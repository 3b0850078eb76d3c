"""The one place where the parts are put together."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request, Response

from metadata_store import MEMORY, open_store
from proxy.abandoned import Abandoned
from proxy.account import Account
from proxy.admission import decode_places
from proxy.background import Background
from proxy.call import Clock
from proxy.config_watch import ConfigWatch
from proxy.dashboard import Newest
from proxy.departures import Departures
from proxy.dialects import DIALECTS
from proxy.drain import Drain
from proxy.errors import ApiError
from proxy.ledger import Ledger
from proxy.logs import set_up_logging
from proxy.memory import Memory
from proxy.pool import Pool
from proxy.recall import Recall
from proxy.remember import Remember
from proxy.reuse_leg import ReuseLeg
from proxy.reuse_switch import ReuseSwitch
from proxy.room import Room
from proxy.routes.admin import Admin
from proxy.routes.api import ApiEndpoint
from proxy.routes.conversations import Conversations
from proxy.routes.dashboard import Dashboard
from proxy.routes.info import info_routes
from proxy.settings import Settings
from proxy.short_path import Application
from proxy.telemetry import Metrics, shared_folder
from proxy.traces import open_traces
from proxy.turn import Turns

_PATIENCE = 5.0
_TRACES_PATIENCE = 2.0


def create_app(settings: Settings, clock: Clock | None = None, drain: Drain | None = None) -> FastAPI:
    """The proxy as an ASGI application. Connects to nothing before it is started.

    ``drain`` is how whoever runs it has it end.
    """
    set_up_logging(settings)
    clock = clock or (_steady() if settings.store == MEMORY else time.time)
    key = settings.worker_api_key
    metrics = Metrics()
    metrics.tell_settings(settings)
    traces = open_traces(settings)
    upstream = traces.upstream(settings.connect_timeout, key.get_secret_value() if key else None)
    pool = Pool(settings, upstream, metrics)
    store = traces.store(open_store(settings.store, settings.store_timeout, clock))
    ledger = Ledger(clock)
    memory = Memory(store, settings.store_pause, ledger, metrics)
    prompt_ids = traces.prompt_ids(settings, pool, upstream, metrics)
    background = Background()
    releaser = traces.releaser(pool, upstream, background, metrics, clock)
    recall = Recall(settings, pool, memory, ledger, prompt_ids, releaser, background, metrics, clock)
    room = Room(settings, pool, upstream, memory, ledger, releaser, background, metrics, clock)
    remember = Remember(settings, memory, room, releaser, metrics, clock)
    answer_leg = traces.answer_leg(settings, pool, upstream, background, metrics)
    abandoned = Abandoned(answer_leg, remember, releaser, background, settings.abandon_grace)
    prefill_leg = traces.prefill_leg(pool, upstream, metrics)
    turns = Turns(
        settings,
        pool,
        recall,
        prompt_ids,
        prefill_leg,
        ReuseLeg(settings, pool, prefill_leg, abandoned, releaser, metrics, clock),
        answer_leg,
        remember,
        room,
        abandoned,
        metrics,
    )
    departures = Departures(settings, pool, memory, ledger, releaser)
    config_watch = settings.config and ConfigWatch(settings.config, settings, pool, departures)

    newest = Newest(shared_folder())
    drain = drain or Drain()
    places = decode_places(pool, settings.max_turns_per_worker)
    admission = traces.admission(places, settings.queue_size, settings.queue_timeout, metrics)
    drain.when_it_begins(admission.close)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with upstream:
            traces.start()
            await store.open()
            pool.start()
            room.start()
            departures.start()
            newest.start()
            if config_watch:
                config_watch.start()
            try:
                yield
            finally:
                if config_watch:
                    await config_watch.stop()
                await newest.stop()
                await departures.stop()
                await room.stop()
                if settings.store == MEMORY:
                    await room.give_back_everything(_PATIENCE)
                await pool.stop()
                await background.stop(_PATIENCE)
                await store.close()
                await traces.stop(_TRACES_PATIENCE)

    app = Application(title="Turnback", version=version("turnback"), lifespan=lifespan)
    app.add_exception_handler(ApiError, _answer)  # type: ignore[arg-type]
    secret = settings.secret_key
    conversations = Conversations(secret, pool, upstream, memory, ledger, releaser, clock)
    app.include_router(conversations.routes())
    app.include_router(Admin(settings, pool, departures, memory, ledger).routes())
    app.include_router(info_routes(pool, upstream, metrics, drain))
    app.include_router(Dashboard(pool, metrics, newest, drain).routes())
    switch, account = ReuseSwitch(settings), Account(metrics, newest)
    for dialect in DIALECTS:
        endpoint = ApiEndpoint(dialect, settings, secret, turns, admission, drain, switch, account)
        app.add_endpoint(dialect.path, traces.endpoint(endpoint, dialect.path))
    return app


async def _answer(_: Request, error: ApiError) -> Response:
    """Of endpoints that let the framework do their answers."""
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return Response(error.body(), error.status, headers, media_type="application/json")


def _steady() -> Clock:
    """The time of day when it was made, and from then on a clock that nobody sets: deadlines must not move.

    Only for entries that no other machine sees.
    """
    begin = time.time() - time.monotonic()
    return lambda: begin + time.monotonic()
