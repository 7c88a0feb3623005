"""A lock server that Sentinels watch: each new connection goes to the one they call master.

The old connections need no watching.  One to a master that died is cut, one to a master that was
demoted is cut by the Sentinels or answers that it is a replica; both count as lost, and a command
that is sent again asks the Sentinels anew.  While a failover runs they name no master, and the
lock server is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_dislock.exceptions import SettingsError
from celery_dislock.node import Node
from celery_dislock.urls import group, redis_options, without_password
from celery_dislock.wire import SOCKET_TIMEOUT, connection_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import redis


def watched(
    url: str, options: Mapping[str, Any], *, pause: Callable[[float], None], min_replicas: int = 0
) -> Node:
    """
    Return the server that these Sentinels call master, whichever it is at the time.

    Args:
        url: ``sentinel://[user:password@]host:port;sentinel://host:port/db``; user and password are
            the Redis servers', not the Sentinels'.
        options: kombu's ``master_name``, ``sentinel_kwargs`` and ``min_other_sentinels``; the rest
            are keyword arguments of redis-py's connections to the master.
        pause: See :class:`celery_dislock.node.Node`.
        min_replicas: See there, too.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    options = dict(options)
    master = options.pop("master_name", None)
    asking = redis_options(options.pop("sentinel_kwargs", None) or {})
    others = options.pop("min_other_sentinels", 0)
    try:
        name, servers, sentinels = group(url)
    except ValueError as exc:
        raise SettingsError("app.conf", "dislock_url", without_password(url), str(exc)) from None
    if not master or not isinstance(master, str):
        raise SettingsError(
            "app.conf",
            "dislock_transport_options",
            sorted(options),
            "sentinel:// needs 'master_name', the name that the Sentinels have for the master",
        )
    make = connection_maker(name, servers, options)
    timeout = asking.setdefault("socket_timeout", options.get("socket_timeout") or SOCKET_TIMEOUT)
    asking.setdefault("socket_connect_timeout", timeout)
    asking.setdefault("retry", Retry(NoBackoff(), 0))
    order = sentinels

    def connect(within: float | None) -> redis.Connection:
        nonlocal order
        limits = {}
        if within is not None:
            each = min(timeout, within / len(order))
            limits = {"socket_timeout": each, "socket_connect_timeout": each}
        with_ = Sentinel(list(order), others, {**asking, **limits})
        try:
            host, port = with_.discover_master(master)
            # The one that answered is put first; it is asked first the next time, too.
            first = with_.sentinels[0].connection_pool.connection_kwargs
            order = tuple(sorted(order, key=lambda s: s != (first["host"], first["port"])))
        finally:
            for sentinel in with_.sentinels:
                sentinel.close()
        return make(host=host, port=port)

    try:
        Sentinel(order, others, asking)
    except TypeError as exc:
        raise SettingsError(
            "app.conf", "dislock_transport_options", "sentinel_kwargs", str(exc)
        ) from exc
    return Node(name, connect, pause=pause, min_replicas=min_replicas)
