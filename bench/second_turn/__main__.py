"""TTFT of a conversation's second turn by length of context: the router against the bare protocol.

`python -m bench.second_turn` starts a real prefill and decode pair on this machine's CPU, without prefix
caches, and serves the same conversations four ways in turns: by a client that sends both legs itself
(bare) and by the router, each without and with reuse. The arms take turns within each conversation
and change their order from one to the next, so that a machine that gets slower or faster meets them
all alike. The first round is thrown away: engines shake hands in it.

Fails if reuse did not happen exactly where it should have, by what the router says and by what
prefill counted; and, where numbers are float32, if an answer with reuse had other tokens than one
without. `--assert-ratio` is for looking into a change on a quiet machine: on a busy one times vary
by more than what it looks for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import aiohttp
from rich.console import Console

from bench.arguments import file_to_write
from bench.failure import BenchFailure
from bench.second_turn.arms import Arm, Bare, Routed
from bench.second_turn.bare import BareClient
from bench.second_turn.conversation import conversation
from bench.second_turn.engines import block_size
from bench.second_turn.measure import Engines, Second, round_of
from bench.second_turn.report import Measured, as_json, table
from bench.second_turn.routers import Router
from deploy.local.failure import LocalFailure
from deploy.local.options import MODEL_NAME, EngineOptions
from deploy.local.pair import Pair
from deploy.local.progress import Progress
from deploy.local.serve import running_pair

CONTEXTS = (1000, 2000, 4000, 8000)
WARM_UPS = 3
"""Tries: the engines' first handshake may take longer than they allow, and succeeds the next time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if it failed, or did not keep ``--assert-ratio``."""
    given = _parser().parse_args(arguments)
    progress = Progress()
    engine = {"dtype": given.dtype, "prefix_caching": False}
    load = [os.getloadavg()[0]]
    try:
        with ExitStack() as stack:
            pair = running_pair(EngineOptions("prefill", **engine), EngineOptions("decode", **engine), progress)
            stack.callback(pair.stop)
            _leave_cores(pair)
            measured = asyncio.run(_measure(pair, given.contexts, given.repeat, progress))
            load.append(os.getloadavg()[0])
    except (LocalFailure, BenchFailure, aiohttp.ClientError, TimeoutError) as failure:
        progress.note(f"{type(failure).__name__}: {failure}")
        return 1
    # Wide enough for a file, too: a table cut to 80 columns is of no use to anybody.
    Console(width=max(140, Console().width)).print(table(measured))
    # The pair alone makes about 2; with much more, the times are those of a crowd.
    progress.note(f"Load of the machine before and after: {load[0]:.1f}, {load[1]:.1f}; cores: {os.cpu_count()}")
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(measured, load), indent=1) + "\n", encoding="utf-8")
    return _verdict(measured, given, progress)


async def _measure(pair: Pair, contexts: Sequence[int], repeat: int, progress: Progress) -> list[Measured]:
    prefill, decode = pair.prefill.url, pair.decode.url
    timeout = aiohttp.ClientTimeout(total=600)
    # vLLM closes idle connections after 5 s.
    connector = aiohttp.TCPConnector(keepalive_timeout=4)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        with ExitStack() as stack:
            routers = [Router("router-off", pair, "--no-reuse"), Router("router-on", pair)]
            for router in routers:
                stack.callback(router.stop)
            for router in routers:
                await router.ready(session)
            bare = BareClient(session, prefill, decode, MODEL_NAME, await block_size(session, decode))
            arms: list[Arm] = [
                Bare("bare off", bare, reuse=False),
                Bare("bare on", bare, reuse=True),
                Routed("router off", session, routers[0].url, MODEL_NAME, reuse=False),
                Routed("router on", session, routers[1].url, MODEL_NAME, reuse=True),
            ]
            engines = Engines(session, prefill, decode)
            with progress.step("Warming up"):
                # The routers' questions about what the engines can do leave blocks for half a minute.
                await engines.at_rest()
                await _warm_up(arms, engines, contexts[0])
            measured = [Measured(context) for context in contexts]
            for number in range(repeat):
                for one in measured:
                    with progress.step(f"Conversation {number + 1} of {repeat}, {one.context:,} tokens"):
                        await _round(arms, engines, one, number)
    return measured


async def _warm_up(arms: list[Arm], engines: Engines, context: int) -> None:
    for number in range(WARM_UPS):
        talk = await conversation(engines.session, engines.prefill, MODEL_NAME, context, f"warm-up-{number}")
        try:
            await round_of(arms, talk, engines)
        except BenchFailure:
            if number + 1 == WARM_UPS:
                raise
        else:
            return


async def _round(arms: list[Arm], engines: Engines, measured: Measured, number: int) -> None:
    talk = await conversation(engines.session, engines.prefill, MODEL_NAME, measured.context, str(number))
    first = number % len(arms)
    order = [*arms[first:], *arms[:first]]
    if number % 2:
        # Else an arm would almost always follow the same other one.
        order.reverse()
    by_name = dict(zip((arm.name for arm in order), await round_of(order, talk, engines), strict=True))
    _note(measured, by_name)


def _note(measured: Measured, by_name: dict[str, Second]) -> None:
    answers = {name: second.turn.answer for name, second in by_name.items()}
    measured.bare.off.append(answers["bare off"].ttft)
    measured.bare.on.append(answers["bare on"].ttft)
    measured.router.off.append(answers["router off"].ttft)
    measured.router.on.append(answers["router on"].ttft)
    measured.prompt_tokens.append(len(answers["router on"].prompt_ids))
    measured.reused_tokens.append(by_name["router on"].turn.reused)
    measured.equal.append(len({tuple(answer.ids) for answer in answers.values()}) == 1)


def _leave_cores(pair: Pair) -> None:
    """Keep this process, and the routers it starts, off the engines' cores where there are others.

    Where there are none, the kernel places them, in every arm alike.
    """
    others = os.sched_getaffinity(0) - {engine.core for engine in pair.engines}
    if others:
        os.sched_setaffinity(0, others)


def _verdict(measured: Sequence[Measured], given: argparse.Namespace, progress: Progress) -> int:
    code = 0
    if given.dtype == "float32" and not all(all(one.equal) for one in measured):
        progress.note("Answers with reuse differ from those without.")
        code = 1
    if given.assert_ratio is not None and (worst := min(one.kept for one in measured)) < given.assert_ratio:
        progress.note(f"The router keeps {worst:.2f} of the bare protocol's ratio, less than {given.assert_ratio}.")
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.second_turn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=_tokens, nargs="+", default=list(CONTEXTS), metavar="TOKENS")
    parser.add_argument("--repeat", type=_count, default=5, metavar="N", help="conversations; default: %(default)s")
    parser.add_argument("--dtype", default="float32", help="of the model; default: %(default)s")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--assert-ratio",
        type=float,
        metavar="SHARE",
        help="exit with 1 if the router keeps less than this share of the bare protocol's ratio at some context",
    )
    return parser


def _tokens(text: str) -> int:
    if not 200 <= (tokens := int(text)) <= 30_000:
        raise argparse.ArgumentTypeError("between 200 and 30000")
    return tokens


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
