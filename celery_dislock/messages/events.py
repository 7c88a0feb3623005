"""Celery's events about what happens to a task's lock, for those who watch the workers.

A worker's main process has a dispatcher, which knows whether anybody wants events.  That process
sends the events about the end of a delivery; see :mod:`celery_dislock.tasks.request`.  Other
processes have no dispatcher: a pool process, a command, or a web server.  They send
each event by a connection of this package's own, whether anybody wants it or not.

The events; monitors rely on their fields:

``task-revoked``
    A task does not run: it is skipped, or a newer one of its key has replaced or cancelled it, or
    an operator has dropped it.
    Fields: ``uuid``, ``reason``, ``state``; ``terminated`` and ``expired`` are False, ``signum``
    is None
``task-parked``
    A task is parked.
    Fields: ``uuid``, ``key``, ``place`` from 1, ``holder`` in words, or `too early: ...`;
    ``held_for``: seconds, if known
``task-lock-lost``
    The lease of a running task can no longer be trusted; once per lease.
    Fields: ``uuid``, ``key``, ``reason``, ``action``: the task's ``lock_on_lost``
``task-lock-capped``
    A running task's lease has had ``max_renew_times`` renewals; once per lease.
    Fields: ``uuid``, ``key``, ``renewals``, ``ends_in``: seconds until the lease ends, ``action``:
    the task's ``lock_on_cap``
"""

from __future__ import annotations

import logging
from socket import gethostname
from typing import TYPE_CHECKING, Any

from celery import states

from celery_dislock.messages.broker import own_producers
from celery_dislock.redaction import reason_of
from celery_dislock.words import finite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery
    from celery.events.dispatcher import EventDispatcher

    from celery_dislock.messages.broker import OwnProducer

logger = logging.getLogger("celery_dislock")


def send_events(app: Celery, sender: str, type_: str, *events: Mapping[str, Any]) -> None:
    """
    Send events from a process that has no dispatcher of a worker's.

    Blocks for the broker, for some seconds at most.  Raises nothing: events that cannot be sent are
    logged at level DEBUG.

    Args:
        app: The app of the tasks.
        sender: Name of the worker, or of this process.
        type_: Type of the events, such as ``task-lock-lost``.
        events: The fields of each event; ``uuid`` is the task's id.
    """

    def publish(producer: OwnProducer) -> None:
        if not producer.is_blocked:  # it declares an exchange, and waits for the answer
            dispatcher = app.events.Dispatcher(
                producer.connection, sender, enabled=False, buffer_while_offline=False
            )
            for fields in events:
                dispatcher.publish(type_, finite(fields), producer)

    try:
        own_producers(app).send(publish)
    except Exception as exc:  # noqa: BLE001 -- any of the broker's client
        logger.debug("Event %s was not sent: %s", type_, reason_of(exc))


def tell_revoked(app: Celery, ended: Mapping[str, str]) -> None:
    """Send ``task-revoked`` by :func:`send`; *ended* has the reason of each task, by its id."""
    if ended:
        events = [{"uuid": task_id, **revoked(reason)} for task_id, reason in ended.items()]
        send_events(app, f"dislock@{gethostname()}", "task-revoked", *events)


def worker_tells_revoked(dispatcher: EventDispatcher | None, ended: Mapping[str, str]) -> None:
    """Send ``task-revoked`` from a worker's main process, if anybody wants events."""
    if dispatcher is not None:
        for task_id, reason in ended.items():
            dispatcher.send("task-revoked", uuid=finite(task_id), **revoked(reason))


def revoked(reason: str) -> dict[str, Any]:
    """
    Return the fields of ``task-revoked`` for a task that ends without having run.

    Celery's State, and so Flower, ranks states that it does not know, such as PARKED, above
    REVOKED, and would keep them.  The field ``state`` overrides that.
    """
    return {
        "terminated": False,
        "signum": None,
        "expired": False,
        "reason": reason,
        "state": states.REVOKED,
    }
