"""A worker as the settings name it."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr

from proxy.http_url import has_credential, http_url

_RANKS = "dp="


def server_url(text: str) -> str:
    """``text`` without a slash at its end; raises ``ValueError`` if it is no http(s) URL of a server."""
    url = http_url(text, "a worker (http://HOST:PORT)")
    if has_credential(url):
        # It would show in logs and metrics, and collide with the key.
        raise ValueError(f"{url.host}: a worker's credential goes into worker_api_key or api_key, not into its URL")
    return text.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class WorkerSpec:
    """One server: in YAML a mapping with these fields, or, as everywhere, a text that ``AnyWorkerSpec`` reads."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    url: Annotated[str, AfterValidator(server_url)]
    """Without a slash at its end."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks behind the URL, each with a KV cache of its own; every request names its rank."""
    api_key: SecretStr | None = field(default=None)
    """In place of the one that all workers are sent."""


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    url, mark, ranks = value.partition("#")
    if not mark:
        return {"url": url}
    if not ranks.startswith(_RANKS) or not ranks.removeprefix(_RANKS).isdecimal():
        raise ValueError(f"{value!r} has something after # that is not dp=N, the number of data-parallel ranks")
    return {"url": url, "data_parallel_size": int(ranks.removeprefix(_RANKS))}


AnyWorkerSpec = Annotated[WorkerSpec, BeforeValidator(_from_text)]
"""Also ``http://HOST:PORT``, or ``http://HOST:PORT#dp=N`` for a server with N data-parallel ranks."""
