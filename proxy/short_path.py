"""The application: FastAPI's, but for the proxied endpoints, which its machinery would cost as much as the rest."""

from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Application(FastAPI):
    """FastAPI, whose layers are passed by for ``POST`` to some paths.

    Each layer wraps every part of an answer once more. What they do for others, those endpoints do themselves:
    errors, limits, headers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._short: dict[str, ASGIApp] = {}

    def add_endpoint(self, path: str, endpoint: ASGIApp) -> None:
        """Have ``endpoint`` answer ``POST`` to ``path``; any other method there gets 405."""
        self._short[path] = endpoint
        self.router.routes.append(Route(path, endpoint, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._short.get(scope["path"])
            if endpoint is not None:
                return await endpoint(scope, receive, send)
        return await super().__call__(scope, receive, send)
