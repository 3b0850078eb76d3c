"""Run the router, and the engines behind it unless others are given, until told to stop."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from deploy.local.failure import LocalFailure
from deploy.local.layout import PROJECT, Layout
from deploy.local.options import EngineOptions
from deploy.local.pair import Engine, Pair
from deploy.local.ports import LOOPBACK, is_free
from deploy.local.process import Process
from deploy.local.progress import Progress
from deploy.local.setup import ensure

WATCH_SECONDS = 0.2
ROUTER_READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` runs. Engines are started here only if no worker is given."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    prefill_engine: EngineOptions = field(default_factory=lambda: EngineOptions("prefill"))
    decode_engine: EngineOptions = field(default_factory=lambda: EngineOptions("decode"))
    store: str = "memory://"
    host: str = LOOPBACK
    port: int = 8000
    router_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("give both prefill and decode workers, or neither")


def serve(options: ServeOptions, progress: Progress) -> None:
    """Start everything, say where it is, and watch it until interrupted (`KeyboardInterrupt`).

    Everything started here has ended when this returns or raises. Raises `LocalFailure` if
    something cannot be started or ends by itself.
    """
    if not is_free(options.port):
        raise LocalFailure(f"Port {options.port} is in use.")
    layout = Layout.default()
    with ExitStack() as stack:
        prefill, decode = options.prefill, options.decode
        engines: tuple[Engine, ...] = ()
        if not prefill:
            pair = running_pair(options.prefill_engine, options.decode_engine, progress)
            stack.callback(pair.stop)
            engines = pair.engines
            prefill, decode = (pair.prefill.url,), (pair.decode.url,)
        router = Process(
            "router",
            router_command(options, prefill, decode),
            log=layout.logs / f"router-{options.port}.log",
            cwd=PROJECT,
        )
        stack.callback(router.stop)
        url = f"http://{options.host}:{options.port}"
        with progress.step("Starting the router"):
            _wait_router(router, engines, url)
        print(_summary(url, prefill, decode, engines, router, options.store), flush=True)
        watch(engines, router)


def running_pair(prefill: EngineOptions, decode: EngineOptions, progress: Progress) -> Pair:
    """A pair that is built, started and ready. The caller stops it; a failure or an interrupt stops it here."""
    layout = ensure(progress=progress)
    pair = Pair(prefill, decode, layout)
    try:
        with progress.step("Starting prefill and decode (about half a minute)"):
            pair.start()
            pair.wait_ready()
    except BaseException:
        pair.stop()
        raise
    return pair


def router_command(options: ServeOptions, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """The router's command line, run by this Python."""
    command = [sys.executable, "-m", "proxy.cli", "serve"]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    command += ["--store", options.store, "--host", options.host, "--port", str(options.port)]
    # Both ends of these must agree; for workers that were given, the operator sees to it.
    if not options.prefill:
        if options.decode_engine.decoder_kv_blocks_ttl is not None:
            command += ["--decoder-kv-blocks-ttl", str(options.decode_engine.decoder_kv_blocks_ttl)]
        if options.prefill_engine.kv_recompute_threshold is not None:
            command += ["--kv-recompute-threshold", str(options.prefill_engine.kv_recompute_threshold)]
    return [*command, *options.router_args]


def watch(engines: Sequence[Engine], router: Process | None = None) -> None:
    """Return never: wait for `KeyboardInterrupt`, or raise `LocalFailure` when one of them ends by itself."""
    while True:
        _check(engines, router)
        time.sleep(WATCH_SECONDS)


def _check(engines: Sequence[Engine], router: Process | None) -> None:
    for engine in engines:
        if engine.exit_code is not None:
            raise LocalFailure(f"The {engine.role} engine ended with code {engine.exit_code}.", engine.log)
    if router is not None and router.exit_code is not None:
        raise LocalFailure(f"The router ended with code {router.exit_code}.", router.log)


def _wait_router(router: Process, engines: Sequence[Engine], url: str) -> None:
    deadline = time.monotonic() + ROUTER_READY_SECONDS
    reason = "no answer"
    while time.monotonic() < deadline:
        _check(engines, router)
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except urllib.error.HTTPError as error:
            reason = f"{error.code}: {error.read(400).decode(errors='replace')}"
        except (urllib.error.URLError, OSError) as error:
            reason = str(error)
        time.sleep(WATCH_SECONDS)
    raise LocalFailure(f"The router was not ready within {ROUTER_READY_SECONDS:.0f} s ({reason}).", router.log)


def _summary(
    url: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    engines: Sequence[Engine],
    router: Process,
    store: str,
) -> str:
    log_of = {engine.url: f"   log: {engine.log}" for engine in engines}
    lines = ["", f"  router   {url}   log: {router.log}"]
    lines += [f"  prefill  {worker}{log_of.get(worker, '')}" for worker in prefill]
    lines += [f"  decode   {worker}{log_of.get(worker, '')}" for worker in decode]
    lines += [f"  store    {store}", "", "Two turns of a conversation (watch x-turnback-reuse):", ""]
    lines += [f"  {line}" for line in conversation(url, _model(url)).splitlines()]
    lines += ["", "Ctrl-C ends it all."]
    return "\n".join(lines)


def conversation(url: str, model: str) -> str:
    """Shell lines that hold a conversation of two turns, long enough for reuse to be worth it."""
    return f"""\
ask() {{ curl -sS -D /dev/stderr {url}/v1/chat/completions \\
  -H 'content-type: application/json' -H 'x-conversation-id: demo' \\
  -d '{{"model": "{model}", "max_tokens": 40, "messages": ['"$1"']}}'; }}
user='{{"role": "user", "content": "'"$(seq -s ' ' 400)"'"}}'
answer=$(ask "$user" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["message"]))')
ask "$user, $answer"', {{"role": "user", "content": "Go on."}}'"""


def _model(url: str) -> str:
    """The first model served, for the example; a placeholder if the list cannot be had."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError):
        return "MODEL"
