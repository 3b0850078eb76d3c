"""`python -m deploy.local serve | pair | setup`: see `--help` of each."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from deploy.local.failure import LocalFailure
from deploy.local.options import EngineOptions, Role
from deploy.local.ports import LOOPBACK
from deploy.local.progress import Progress
from deploy.local.serve import ServeOptions, running_pair, serve, watch
from deploy.local.setup import ensure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. 0 also after Ctrl-C or SIGTERM, except where that leaves a build undone: 130."""
    parser = _parser()
    given = parser.parse_args(arguments)
    progress = Progress()
    # SIGINT too: started in the background of a script, Python finds it ignored and leaves it so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        if given.command == "serve":
            serve(_serve_options(parser, given), progress)
        elif given.command == "pair":
            _pair(given, progress)
        else:
            ensure(progress=progress)
    except KeyboardInterrupt:
        progress.note("Stopped.")
        return 130 if given.command == "setup" else 0
    except LocalFailure as failure:
        progress.note(str(failure))
        return 1
    return 0


def _pair(given: argparse.Namespace, progress: Progress) -> None:
    pair = running_pair(_engine("prefill", given), _engine("decode", given), progress)
    try:
        for engine in pair.engines:
            progress.note(f"log of {engine.role}: {engine.log}")
        # As `make serve` takes them.
        print(f"PREFILL={pair.prefill.url} DECODE={pair.decode.url}", flush=True)
        watch(pair.engines)
    finally:
        pair.stop()


def _serve_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> ServeOptions:
    try:
        return ServeOptions(
            prefill=tuple(given.prefill),
            decode=tuple(given.decode),
            prefill_engine=_engine("prefill", given),
            decode_engine=_engine("decode", given),
            store=given.store,
            host=given.host,
            port=given.port,
            router_args=tuple(given.router_arg),
        )
    except ValueError as error:
        parser.error(str(error))


def _engine(role: Role, given: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        role,
        dtype=given.dtype,
        prefix_caching=given.prefix_caching,
        decoder_kv_blocks_ttl=given.decoder_kv_blocks_ttl,
        kv_recompute_threshold=given.kv_recompute_threshold,
        max_model_len=given.max_model_len,
        reasoning_parser=given.reasoning_parser,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="build the engines' environment and the model, and no more")
    pair = commands.add_parser("pair", help="run one prefill and one decode engine")
    both = commands.add_parser("serve", help="run the router, and a pair unless workers are given")
    for command in (pair, both):
        _add_engine_options(command)
    both.add_argument("--prefill", nargs="+", action="extend", default=[], metavar="URL")
    both.add_argument("--decode", nargs="+", action="extend", default=[], metavar="URL")
    both.add_argument("--store", default="memory://", metavar="URL", help="memory:// or redis://…")
    both.add_argument("--host", default=LOOPBACK)
    both.add_argument("--port", type=int, default=8000)
    both.add_argument(
        "--router-arg", action="append", default=[], metavar="ARG", help="one more argument for the router"
    )
    return parser


def _add_engine_options(command: argparse.ArgumentParser) -> None:
    defaults = EngineOptions("prefill")
    group = command.add_argument_group("engines started here")
    group.add_argument("--dtype", default=defaults.dtype, help="default: %(default)s")
    group.add_argument("--prefix-caching", action="store_true", help="the engines' own prefix caches on")
    group.add_argument("--decoder-kv-blocks-ttl", type=int, metavar="SECONDS", help="vLLM's default: 480")
    group.add_argument("--kv-recompute-threshold", type=int, metavar="TOKENS", help="vLLM's default: 64")
    group.add_argument("--max-model-len", type=int, default=defaults.max_model_len, metavar="TOKENS")
    group.add_argument("--reasoning-parser", metavar="NAME", help="such as qwen3; default: none")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
