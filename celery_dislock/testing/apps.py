"""What a test changes in an app: its settings, its servers, and the connections that it keeps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery.backends.redis import RedisBackend
from kombu.pools import connections, producers

from celery_dislock.config.urls import CLUSTER, SENTINEL, SINGLE
from celery_dislock.parking.process import runtime_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery


def database(url: str, more: int) -> str:
    """Return the URL of a database of a server, given the URL of its first, and its number."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        query = dict(parse_qsl(parts.query))
        query["db"] = str(int(query.get("db", 0)) + more)
        return f"unix://{parts.netloc}{parts.path}?{urlencode(query)}"
    return parts._replace(path=f"/{int(parts.path.strip('/') or 0) + more}").geturl()


def for_celery(url: str) -> str:
    """Return a URL as Celery spells it: a unix socket has a scheme of its own there."""
    return url.replace("unix://", "redis+socket://", 1).replace("db=", "virtual_host=", 1)


def is_redis(given: str | Sequence[str] | None) -> bool:
    """Tell whether a broker or a result backend is a Redis, or not set."""
    url = given if isinstance(given, str) else next(iter(given or ""), "")  # a list is a failover
    return not url or url.startswith((*SINGLE, *SENTINEL, *CLUSTER))


def begin_anew(app: Celery) -> None:
    """Make an app forget its settings, and close and forget its connections."""
    runtime = runtime_of(app)
    runtime.close()
    vars(runtime).pop("settings", None)
    vars(app).pop("_dislock_sender", None)
    # Celery has no public way.
    backend, amqp = app._backend, app.amqp  # noqa: SLF001
    used = amqp._producer_pool, app._pool  # noqa: SLF001
    for pools in (producers, connections):
        for name, pool in [*pools.items()]:
            if pool in used:
                pools.pop(name).force_close_all()
    app._pool = app._backend_cache = amqp._producer_pool = None  # noqa: SLF001
    app._local = threading.local()  # noqa: SLF001
    vars(app).pop("control", None)
    if isinstance(backend, RedisBackend) and "client" in vars(backend):
        backend.result_consumer.stop()
        backend.remove_pending_result = lambda result: result  # a late result connects it again
        backend.client.connection_pool.disconnect()
