"""Pools that await the bodies of tasks, and tasks whose bodies must be awaited.

A pool says that it awaits by an attribute of its class, ``awaits_coroutines = True``.  Before its
tracer goes on, it awaits what a call of the task returns, in an asyncio task that has the context
variables with which ``task_prerun`` was sent, or a copy of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.exceptions import SettingsError
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.bridge import require_greenlet
from celery_dislock.tasks.task import follow_contexts, guards_of

if TYPE_CHECKING:
    from celery import Celery

ATTRIBUTE = "awaits_coroutines"
KNOWN = {"celery_aio_pool.pool:AsyncIOPool"}  # pools that await, and do not have the attribute


def check_bodies(app: Celery, pool: type) -> None:
    """
    Check that a worker's pool awaits the bodies that must be awaited.

    Args:
        app: The app, whose tasks have their guards already.
        pool: The class of the pool.

    Raises:
        SettingsError: It does not, or greenlet is not installed.
    """
    runtime = runtime_of(app)
    runtime.unawaited_by = None if _awaits(pool) else _name(pool)
    if runtime.unawaited_by is None:
        follow_contexts()
    must_be_awaited = [guard for guard in guards_of(app).values() if guard.is_async]
    for guard in () if runtime.off else must_be_awaited:
        if runtime.unawaited_by is not None:
            raise guard.unawaited()
        try:
            require_greenlet()
        except ImportError as exc:
            raise SettingsError(guard.name, "worker_pool", _name(pool), str(exc)) from exc


def _awaits(pool: type) -> bool:
    awaits = getattr(pool, ATTRIBUTE, None)
    return any(_name(kind) in KNOWN for kind in pool.__mro__) if awaits is None else bool(awaits)


def _name(pool: type) -> str:
    return f"{pool.__module__}:{pool.__qualname__}"
