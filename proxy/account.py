"""What is told about a turn when it is over: its metrics, its line in the log, its place on the page."""

import time
from functools import cache

from proxy.call import Report
from proxy.dashboard import Newest, told_turn
from proxy.logs import Lines
from proxy.telemetry import Metrics, context_of
from router.reuse import Outcome


class Account:
    """Tells of turns. Never of their text, and of who asked only a hash."""

    def __init__(self, metrics: Metrics, newest: Newest) -> None:
        self._metrics = metrics
        self._newest = newest
        # Finding a series takes longer than counting in it, and there are few.
        self._turns, self._turn_seconds = cache(metrics.turns.labels), cache(metrics.turn_seconds.labels)
        self._ttft, self._context_ttft = cache(metrics.ttft.labels), cache(metrics.context_ttft.labels)
        self._tpot, self._prompt_tokens = cache(metrics.tpot.labels), cache(metrics.prompt_tokens.labels)
        self._log = Lines()

    def of(self, endpoint: str, request_id: str, report: Report) -> None:
        """The turn is over, whatever became of it."""
        seconds = time.perf_counter() - report.started
        ttft = _between(report.started, report.first_part)
        decode_first = _between(report.decode_sent, report.first_part)
        tpot = _per_token(report)
        # Not those that no worker was asked about: bad requests, and what is refused for load or at the end.
        if report.outcome is not None:
            self._count(endpoint, report.outcome, report, seconds)
            if ttft is not None:
                self._ttft(endpoint, report.outcome).observe(ttft)
                if report.prompt_tokens is not None:
                    self._context_ttft(context_of(report.prompt_tokens), _reused(report)).observe(ttft)
            if decode_first is not None:
                self._metrics.decode_first_token.observe(decode_first)
            if tpot is not None:
                self._tpot(endpoint).observe(tpot)
            self._newest.add(told_turn(report, endpoint, ttft, seconds))
        self._log.info(
            "turn",
            {
                "request_id": request_id,
                "endpoint": endpoint,
                "status": report.status,
                "conversation": report.conversation,
                "outcome": report.outcome,
                "reason": report.reason,
                "turn": report.turn,
                "prompt_tokens": report.prompt_tokens,
                "reused_tokens": report.reused_tokens,
                "recomputed_tokens": report.recomputed_tokens,
                "output_tokens": report.output_tokens,
                "prefill": report.prefill,
                "prefill_request_id": report.prefill_request_id,
                "decode": report.decode,
                "decode_request_id": report.decode_request_id,
                "pause_seconds": _rounded(report.pause_seconds),
                "queue_seconds": _rounded(report.queue_seconds),
                "render_seconds": _rounded(report.render_seconds),
                "prefill_seconds": _rounded(report.prefill_seconds),
                "decode_first_token_seconds": _rounded(decode_first),
                "ttft_seconds": _rounded(ttft),
                "tpot_seconds": _rounded(tpot),
                "seconds": _rounded(seconds),
            },
        )

    def _count(self, endpoint: str, outcome: Outcome, report: Report, seconds: float) -> None:
        metrics = self._metrics
        self._turns(endpoint, outcome, report.reason).inc()
        self._turn_seconds(endpoint, outcome).observe(seconds)
        if report.pause_seconds is not None:
            metrics.pause.observe(report.pause_seconds)
        if report.output_tokens is not None:
            metrics.output_tokens.inc(report.output_tokens)
        if report.prompt_tokens is None:
            return
        self._prompt_tokens("reused").inc(report.reused_tokens)
        computed = report.prompt_tokens - report.reused_tokens
        if report.recomputed_tokens is None:
            self._prompt_tokens("unknown").inc(computed)
        else:
            again = min(computed, report.recomputed_tokens)
            self._prompt_tokens("recomputed").inc(again)
            self._prompt_tokens("new").inc(computed - again)


def _reused(report: Report) -> str:
    return "yes" if report.reused_tokens else "no"


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _per_token(report: Report) -> float | None:
    """Seconds per token after the first."""
    took = _between(report.first_part, report.last_part)
    return None if took is None or (report.output_tokens or 0) < 2 else took / ((report.output_tokens or 0) - 1)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
