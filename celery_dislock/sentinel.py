"""A lock server that Sentinels watch: each new connection goes to the one they call master.

The old connections need no watching.  One to a master that died is cut, one to a master that was
demoted is cut by the Sentinels or answers that it is a replica; both count as lost, and a command
that is sent again asks the Sentinels anew.  While a failover runs they name no master, and the
lock server is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_dislock.exceptions import SettingsError
from celery_dislock.node import Node
from celery_dislock.reasons import Ours, reason_of
from celery_dislock.urls import HIDDEN, group, redis_options, without_password
from celery_dislock.wire import SOCKET_TIMEOUT, connection_maker, unknown_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Address = tuple[str, int]


NAMED = 5  # Sentinels whose answers an error tells


class NoMaster(Ours, redis.ConnectionError):  # reads as what is the case
    """The Sentinels name no master."""


class NoSentinel(NoMaster, redis.TimeoutError):
    """One of them did not answer in time, and none named a master."""


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
    asking = options.pop("sentinel_kwargs", None) or {}
    if not isinstance(asking, Mapping):
        shown = {"sentinel_kwargs": HIDDEN}
        raise SettingsError("app.conf", "dislock_transport_options", shown, "give a dict")
    asking = redis_options(asking)
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
    patience = options.get("socket_timeout") or SOCKET_TIMEOUT
    # All of them together are given as long as one server, unless the time of each is given.
    timeout = asking.setdefault("socket_timeout", patience / len(sentinels))
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
            first, address = _ask(with_, order, master)
        finally:
            for sentinel in with_.sentinels:
                sentinel.close()
        order = tuple(sorted(order, key=lambda one: one != first))  # asked first the next time, too
        return make(host=address[0], port=address[1])

    try:
        Sentinel(order, others, asking)
    except TypeError as exc:
        raise SettingsError(
            "app.conf", "dislock_transport_options", "sentinel_kwargs", unknown_option(exc)
        ) from None
    return Node(name, connect, pause=pause, min_replicas=min_replicas)


def _why_not(state: Mapping[str, Any] | None) -> str:
    if not state:
        return "knows no such master"
    down = state["is_sdown"] or state["is_odown"]
    return "calls it down" if down else "sees too few other Sentinels"


def _ask(sentinels: Sentinel, known_as: Sequence[Address], master: str) -> tuple[Address, Address]:
    """
    Ask one Sentinel after another for the master, until one names it.

    Returns:
        Who has answered, and where the master is.

    Raises:
        NoMaster: None of them names a master; it says what each has said.
    """
    said, kind = [], NoMaster
    for (host, port), sentinel in zip(known_as, sentinels.sentinels, strict=True):
        try:
            masters: Any = sentinel.sentinel_masters()
        except (RedisError, OSError) as exc:
            said.append(f"{host}:{port}: {reason_of(exc)}")
            if isinstance(exc, redis.TimeoutError):
                kind = NoSentinel
            continue
        state = masters.get(master)
        if state and sentinels.check_master_state(state, master):
            return (host, port), (state["ip"], state["port"])
        said.append(f"{host}:{port}: {_why_not(state)}")
    shown = said[:NAMED] + ([f"and {len(said) - NAMED} more"] if len(said) > NAMED else [])
    raise kind(f"no Sentinel names a master {master!r} ({'; '.join(shown)})")
