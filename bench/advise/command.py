"""The command: `turnback advise`."""

from __future__ import annotations

import argparse
import http.client
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from bench.advise.advice import advise
from bench.advise.current import current_of
from bench.advise.evidence import Current, Evidence
from bench.advise.from_bench import from_bench
from bench.advise.from_metrics import Scrape, from_metrics
from bench.advise.words import show
from bench.failure import BenchFailure
from bench.result import load

_PATIENCE = 10.0
"""Seconds to wait for a router's metrics."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code: 0 for any advice, 2 for what cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        evidence, current = _read(options)
    except BenchFailure as error:
        print(f"turnback advise: {error}", file=sys.stderr)
        return 2
    advice = advise(evidence, current)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(advice), indent=1).decode())
    else:
        show(advice, evidence, Console(highlight=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnback advise",
        description="Says what to set, and whether reuse pays, from a bench result or from running routers.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a result of turnback bench, or saved metrics of a router; -: from stdin",
    )
    parser.add_argument(
        "--url", nargs="+", default=[], metavar="URL", help="running routers, all that share the traffic; needs no file"
    )
    defaults = Current()
    parser.add_argument(
        "--decoder-kv-blocks-ttl", type=_positive, metavar="SECONDS",
        help=f"what is set now (what the routers tell, or the bench was told; else {defaults.ttl:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--kv-recompute-threshold", type=int, metavar="TOKENS",
        help=f"what is set now (what the routers tell, else {defaults.threshold})",
    )  # fmt: skip
    parser.add_argument(
        "--retained-share", type=_share, metavar="SHARE",
        help=f"share of decode's KV cache that may be held (what the routers tell, else {defaults.retained_share})",
    )  # fmt: skip
    parser.add_argument(
        "--turns-per-second", type=_positive, metavar="N", help="to reckon memory with, instead of what was seen"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _positive(text: str) -> float:
    return _within(text, sys.float_info.max, "a number above 0")


def _share(text: str) -> float:
    return _within(text, 1.0, "a share above 0, up to 1")


def _within(text: str, most: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def _read(options: argparse.Namespace) -> tuple[Evidence, Current]:
    if bool(options.file) == bool(options.url):
        raise BenchFailure("name either a file or --url")
    if options.url:
        evidence = from_metrics([_fetched(url) for url in options.url], f"what {' and '.join(options.url)} saw so far")
    elif options.file == "-":
        evidence = from_metrics([Scrape("standard input", sys.stdin.read())], "the metrics on standard input")
    elif _is_json(Path(options.file)):
        result = load(Path(options.file))
        evidence = from_bench(result, f"{options.file}, a bench of {result.created}")
    else:
        evidence = from_metrics([Scrape(options.file, _text(Path(options.file)))], f"the metrics in {options.file}")
    if options.turns_per_second is not None:
        evidence = replace(evidence, turns_per_second=options.turns_per_second)
    return evidence, current_of(
        evidence,
        ttl=options.decoder_kv_blocks_ttl,
        threshold=options.kv_recompute_threshold,
        retained_share=options.retained_share,
    )


def _is_json(path: Path) -> bool:
    return _text(path).lstrip()[:1] == "{"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise BenchFailure(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchFailure(f"{path} is neither a result of turnback bench nor metrics") from error


def _fetched(url: str) -> Scrape:
    address = url.rstrip("/")
    if not address.endswith("/metrics"):
        address += "/metrics"
    # A router is near: no proxy of the environment stands between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError("not an http:// or https:// URL")
        with opener.open(address, timeout=_PATIENCE) as answer:
            return Scrape(url, answer.read().decode(), time.time())
    except (OSError, ValueError, http.client.HTTPException) as error:
        detail = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BenchFailure(f"cannot read {address}: {detail}") from error
