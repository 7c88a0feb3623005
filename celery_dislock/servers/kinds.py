"""Choose the kind of lock server for a URL: one Redis, Sentinels, a Redis Cluster, or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.config.urls import CLUSTER, MEMORY, SENTINEL, without_password
from celery_dislock.exceptions import SettingsError
from celery_dislock.servers.connecting import BLOCKING, connection_maker
from celery_dislock.servers.node import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.server import Server


def server_for(
    url: str | Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    driver: Driver = BLOCKING,
) -> Server:
    """
    Return the lock server of a URL.  Does not connect yet.

    Args:
        url: redis://, rediss:// or unix://, Celery's redis+socket://, kombu's sentinel://,
            redis+cluster:// or rediss+cluster://; or a list of three or more URLs of independent
            single servers; or memory://.
        options: Keyword arguments of redis-py's Connection, in addition to those of the URL.  Also
            ``ssl`` for TLS if the URL does not ask for it; for sentinel:// kombu's
            ``master_name``, ``sentinel_kwargs`` and ``min_other_sentinels``; and ``min_replicas``,
            see :class:`celery_dislock.servers.node.Node`.
        driver: How it waits.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    options = dict(options or {})
    replicas = options.pop("min_replicas", 0)
    # Imported when asked for: most processes have a single server, and a web process starts fast.
    if not isinstance(url, str):
        from celery_dislock.servers.quorum import Quorum  # noqa: PLC0415

        return Quorum(url, options, driver)
    if url.startswith(SENTINEL):
        from celery_dislock.servers.sentinel import watched  # noqa: PLC0415

        name, connect, sentinels = watched(url, options, driver)
        return Node(name, connect, driver.pause, min_replicas=replicas, watched_by=sentinels)
    if url.startswith(CLUSTER):
        from celery_dislock.servers.cluster import Cluster  # noqa: PLC0415

        return Cluster(url, options, driver=driver, min_replicas=replicas)
    if url == MEMORY:
        try:
            from celery_dislock.servers.memory import memory_server  # noqa: PLC0415 -- an extra
        except ImportError as exc:
            raise SettingsError("app.conf", "dislock_url", MEMORY, str(exc)) from exc
        url = memory_server().url
    name = without_password(url)
    make = connection_maker(name, url, options, driver)
    return Node(name, make, driver.pause, min_replicas=replicas)
