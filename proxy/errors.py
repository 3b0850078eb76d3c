"""Failures, as OpenAI's API spells them."""

import msgspec

_WORKERS_BACK = 5
"""Seconds in which a worker that is down may well be found up again."""

_OTHER_REPLICA = 1
"""Seconds in which a load balancer notices that this replica is not ready."""


class ApiError(Exception):
    """An answer of our own making, for a request that no worker could or should serve."""

    def __init__(
        self, status: int, message: str, *, kind: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        """``retry_after``: seconds after which the same request may be served; None if that is not to be hoped."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON to send: OpenAI's error object, ``code`` being the status as vLLM has it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The same as an event of a stream that cannot go on. No ``[DONE]`` may follow it."""
        return b"data: " + self.body() + b"\n\n"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: what the client sent cannot be served by any worker."""
    return ApiError(400, message, kind="invalid_request_error", param=param)


def forbidden(message: str) -> ApiError:
    """403: it takes a key that the request does not have."""
    return ApiError(403, message, kind="permission_error")


def too_large(limit: int) -> ApiError:
    """413: the body is longer than ``limit`` bytes."""
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes (setting max_body_bytes).",
        kind="invalid_request_error",
    )


def nobody_answers() -> ApiError:
    """503: every worker that could serve the turn was tried. Which and why is the log's: addresses stay inside."""
    return ApiError(
        503,
        "No worker could serve this request; the router's log says why.",
        kind="service_unavailable_error",
        retry_after=_WORKERS_BACK,
    )


def too_many(retry_after: int) -> ApiError:
    """429: as many turns run as may, and there is no room to wait, or it took too long."""
    return ApiError(
        429, "Too many requests are being served; try again later.", kind="rate_limit_error", retry_after=retry_after
    )


def draining() -> ApiError:
    """503: this process is about to end."""
    return ApiError(
        503,
        "This server is shutting down; try again.",
        kind="service_unavailable_error",
        retry_after=_OTHER_REPLICA,
    )


def took_too_long(limit: float) -> ApiError:
    """504: the turn was not over within ``limit`` seconds."""
    return ApiError(
        504, f"The answer was not complete within {limit:g} s (setting turn_timeout).", kind="timeout_error"
    )


def broken_off(detail: str) -> ApiError:
    """502: decode's answer ended before it was complete."""
    return ApiError(502, f"The answer was broken off: {detail}.", kind="upstream_error")


def internal() -> ApiError:
    """500: a fault of our own; the log has it."""
    return ApiError(500, "Turnback failed to serve this request; its log says why.", kind="internal_error")
