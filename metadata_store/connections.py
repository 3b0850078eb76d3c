"""The client that a Redis URL asks for: of one server, of the master that Sentinels name, or of a cluster.

    redis://[[USER]:PASSWORD@]HOST[:6379][/DB]                  rediss:// with TLS, unix:///PATH
    redis+sentinel://[[USER]:PASSWORD@]HOST[:26379][,HOST[:PORT]…]/SERVICE[/DB]
    redis+cluster://[[USER]:PASSWORD@]HOST[:6379][,HOST[:PORT]…]

With ``rediss+sentinel`` and ``rediss+cluster`` everything goes over TLS. Options behind ``?`` are redis-py's, but for
those that would make answers unreadable (``client_for``);
``sentinel_username`` and ``sentinel_password`` are for the Sentinels, user and password for the servers.
"""

import contextlib
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

SCHEMES = (
    *("redis://", "rediss://", "unix://"),
    *("redis+sentinel://", "rediss+sentinel://", "redis+cluster://", "rediss+cluster://"),
)

_MOST = 1000
"""Connections of redis-py's own per server, where it fails a call at its bound, 100 by default, and does not wait."""

Client = Redis | RedisCluster


def client_for(url: str, timeout: float) -> Client:
    """Nothing is connected yet. ``timeout`` in seconds bounds connecting and each answer to what the client asks.

    What a ``Pipeline`` asks over a connection of the client's is bounded by the pipeline: there ``socket_timeout``
    holds only while it is being made, and ``max_connections`` not at all, whether they are from here or from the URL.

    Raises ``ValueError`` for a URL that is none, or has options with which answers could not be read.
    """
    parts = _split(url)
    kind = parts.scheme.partition("+")[2]
    settings: dict[str, Any] = {
        "socket_timeout": timeout,
        # Less than the call has: that nobody is there is worth more to know than that it took too long.
        "socket_connect_timeout": timeout * 0.8,
        "health_check_interval": 30,
        # With version 3 redis-py expects notes of maintenance, and no longer looks whether a connection that was idle
        # has been closed: after a restart of the server the first call would be lost.
        "protocol": 2,
        "max_connections": _MOST,
        # A command whose answer was lost may have been done: a ``put`` sent again would displace itself,
        # and the caller release what it has just stored.
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        match kind:
            case "sentinel":
                client: Client = _by_sentinels(parts, settings, timeout)
            case "cluster":
                client = _of_cluster(parts, settings, timeout)
            case _:
                client = Redis.from_url(url, **settings)
        if isinstance(client, Redis):
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)
            options = pool.connection_kwargs
        else:
            options = client.connection_kwargs
    except (TypeError, AttributeError, RedisError, RedisClusterException) as error:
        raise ValueError(f"a Redis URL with an option that is none: {error}") from error
    if options.get("decode_responses"):
        raise ValueError("a Redis URL must not set decode_responses: entries are no text")
    if str(options.get("protocol")) != "2":
        raise ValueError("a Redis URL must not set protocol to another than 2: what the server tells is no answer then")
    return client


async def close(client: Client) -> None:
    """Close all connections, those to Sentinels too. One that cannot be closed in time or in order is let go."""
    clients: list[Any] = [client]
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        clients += client.connection_pool.sentinel_manager.sentinels
    for one in clients:
        with contextlib.suppress(RedisError, OSError):
            await one.aclose()


async def where(client: RedisCluster, key: str) -> dict[str, Any]:
    """What to add to a script's call so that it goes to the node that has ``key``.

    redis-py sends scripts to any node, to be redirected.
    """
    await client.initialize()
    return {"target_nodes": client.get_node_from_key(key)}


def everywhere(client: Client) -> dict[str, Any]:
    """What to add to a call so that it goes to each master."""
    return {} if isinstance(client, Redis) else {"target_nodes": RedisCluster.PRIMARIES}


async def drop_idle(client: Client) -> None:
    """Close the connections that nobody uses; a cluster's client looks after them by itself."""
    if isinstance(client, Redis):
        await client.connection_pool.disconnect(inuse_connections=False)


async def look_again(client: Client) -> None:
    """After an answer of a replica: where that master was, may be another by now, or elsewhere."""
    if isinstance(client, Redis):
        await drop_idle(client)
    else:
        # Redirections tell the library of slots, not whether who had them before is a master at all.
        await client.nodes_manager.initialize()


def _by_sentinels(url: SplitResult, settings: dict[str, Any], timeout: float) -> Redis:
    service, _, database = url.path.removeprefix("/").partition("/")
    if not service or not (database or "0").isdecimal():
        raise ValueError(f"a URL {url.scheme}://HOST[:PORT][,…]/SERVICE[/DB] must name the service")
    hosts = _hosts(url, 26379)
    options = settings | _options(url)
    if database:
        options["db"] = int(database)
    # One that does not answer must leave time for the others and for the server itself.
    share = timeout / (len(hosts) + 1)
    asking = {
        "username": options.pop("sentinel_username", None),
        "password": options.pop("sentinel_password", None),
        "socket_timeout": share,
        "socket_connect_timeout": share,
        **{name: settings[name] for name in ("retry", "protocol")},
        **{name: value for name, value in options.items() if name.startswith("ssl")},
    }
    sentinels: Any = Sentinel(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    master: Redis = sentinels.master_for(unquote(service), **options)
    return master


def _of_cluster(url: SplitResult, settings: dict[str, Any], timeout: float) -> RedisCluster:
    if url.path not in ("", "/", "/0"):
        raise ValueError(f"a URL {url.scheme}://HOST[:PORT][,…] has no path: a cluster has one database")
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, 6379)]
    settings |= {
        # Less than the call has, so that the library sees that a node hangs: then it asks who is there now.
        "socket_timeout": timeout * 0.8,
        "socket_connect_timeout": timeout / 2,
        # A redirection teaches it one slot. Every so many it would begin anew, and break off what others have asked.
        "reinitialize_steps": 0,
    }
    return RedisCluster(startup_nodes=nodes, **settings | _options(url))


def _split(url: str) -> SplitResult:
    """A URL that may have several hosts: releases of Python since 2025 take no list with IPv6 addresses in it."""
    scheme, _, rest = url.partition("://")
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    return SplitResult(scheme.lower(), hosts, slash + path, query, fragment)


def _hosts(url: SplitResult, usual_port: int) -> list[tuple[str, int]]:
    found = []
    for place in url.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{place}")
        if not one.hostname:
            raise ValueError(f"a URL {url.scheme}://HOST[:PORT][,…] lacks a host")
        found.append((one.hostname, usual_port if one.port is None else one.port))
    return found


def _options(url: SplitResult) -> dict[str, Any]:
    """What user, password and the part behind ``?`` say, as redis-py reads them."""
    user, at, _ = url.netloc.rpartition("@")
    options: dict[str, Any] = dict(parse_url(f"{url.scheme.partition('+')[0]}://{user}{at}?{url.query}"))
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    return options
