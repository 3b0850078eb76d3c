"""`turnback bench`: multi-turn conversations against a server, and what they took."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console

from bench.failure import BenchFailure
from bench.multiturn.client import Client, Model
from bench.multiturn.measure import measure
from bench.multiturn.plan import plan
from bench.multiturn.progress import RunProgress
from bench.multiturn.report import page, write
from bench.multiturn.run import Run
from bench.multiturn.settings import BenchSettings, WrongSettings, load, shown
from bench.multiturn.summary import Summary, summarised
from bench.multiturn.table import tables
from bench.multiturn.talk import Workload
from bench.multiturn.watch import Look, Watch
from bench.multiturn.words import Measure
from bench.result import Result, save

_LEAST_WIDTH = 120
"""Of the tables in a file or a pipe."""


def main(arguments: Sequence[str]) -> int:
    """Run it; its exit code: 0, 1 if something went wrong, 2 for wrong settings."""
    try:
        settings = load(arguments)
    except WrongSettings as error:
        print(f"turnback: wrong setting: {error}", file=sys.stderr)
        return 2
    try:
        with RunProgress() as progress:
            result, summary = asyncio.run(bench(settings, progress))
    except BenchFailure as failure:
        print(f"turnback: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _tell(settings, result, summary)


async def bench(settings: BenchSettings, progress: RunProgress) -> tuple[Result, Summary]:
    """One run. Raises ``BenchFailure`` if it cannot be made."""
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    async with Client(
        settings.url, api_key=key, timeout=settings.timeout, connections=settings.concurrency + 4
    ) as client:
        model = await client.model(settings.model)
        found = await measure(client, model.name)
        workload = plan(settings, found, model.max_length)
        run = Run(client, model, found, settings, progress.turn, progress.say)
        await run.check()
        watch = Watch(client, run.began, settings.poll)
        watch.start()
        try:
            before, after = await _serve(run, workload, settings, watch, progress)
        finally:
            await watch.stop()
            await run.forget_all()
    arms = [arm.name for arm in run.arms]
    fates = _since(before, after)
    summary = summarised(run.turns, arms, watch.retained, fates, settings.contexts)
    result = Result(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings),
        arms=arms,
        workload=_told(model, found, workload),
        turns=run.turns,
        retained=watch.retained,
        summary=msgspec.to_builtins(summary),
        ttl_seconds=settings.ttl,
        kv_capacity_tokens=watch.capacity or None,
    )
    return result, summary


async def _serve(
    run: Run, workload: Workload, settings: BenchSettings, watch: Watch, progress: RunProgress
) -> tuple[Look, Look]:
    """All phases; what the router said before and after those that count."""
    arms = len(run.arms)
    if settings.warm_up:
        progress.phase("Warming up", 2 * arms * settings.warm_up)
        await run.warm_up()
    turns = settings.repeat * sum(len(talk.turns) for talk in workload.talks) + settings.past_ttl
    progress.phase("Conversations", arms * turns)
    before = await watch.look()
    await run.main(workload.talks)
    return before, await watch.look()


def _since(before: Look, after: Look) -> dict[str, int] | None:
    """Prompt tokens by fate; None if the router does not tell."""
    found = {fate: int(count - before.prompt_tokens.get(fate, 0)) for fate, count in after.prompt_tokens.items()}
    return {fate: count for fate, count in found.items() if count > 0} or None


def _told(model: Model, found: Measure, workload: Workload) -> dict[str, Any]:
    return {
        "model": model.name,
        "conversations": len(workload.talks),
        "turns": sum(len(talk.turns) for talk in workload.talks),
        "passed_over": workload.passed_over,
        "tokens_per_word": round(found.per_word, 3),
    }


def _tell(settings: BenchSettings, result: Result, summary: Summary) -> int:
    problems = problems_of(settings, summary)
    console = Console()
    Console(width=max(_LEAST_WIDTH, console.width)).print(tables(summary))
    names = [settings.output.with_name(settings.output.name + ending) for ending in (".json", ".html")]
    try:
        save(result, names[0])
        write(names[1], page(result, summary, problems))
    except BenchFailure as failure:
        problems.append(str(failure))
    else:
        print(f"Written: {names[0]}, {names[1]}")
    for problem in problems:
        print(f"turnback: {problem}", file=sys.stderr)
    return 1 if problems else 0


def problems_of(settings: BenchSettings, summary: Summary) -> list[str]:
    """What makes the run a failed one, for people."""
    problems = []
    if errors := sum(row.errors for row in summary.arms):
        problems.append(f"{errors} turns got no complete answer; their conversations ended there")
    if settings.require_equal and summary.equal < summary.compared:
        problems.append(f"{summary.compared - summary.equal} answers with reuse differ from those without")
    past = summary.past_ttl
    if settings.past_ttl and past is None:
        problems.append("no conversation was left to go on past the TTL")
    if past is not None:
        if past.reused:
            problems.append(f"{past.reused} turns past the TTL reused blocks that decode need not have any more")
        if past.errors:
            problems.append(f"{past.errors} turns past the TTL got no complete answer")
        if settings.require_equal and past.equal < past.compared:
            problems.append(f"{past.compared - past.equal} answers past the TTL differ")
    return problems
