"""Release, when a worker starts, what a dead one of the same name has left behind.

A worker that is killed as a whole, or loses its power, leaves its leases to expire.  The one that
comes back under its node name need not wait for that: it looks through the locks on the server and
ends the leases of its own name, once, before it has a pool.

To free the lock of a worker that lives would be worse than any wait.  So a lease is ended only
where all of this speaks for a death:

- its process was on a machine of this name, and there is no such process here: the child of a
  worker that is just being shut down is one, and answers no ping;
- no worker of that name answers a ping on the broker: in another container of that machine, its
  process could not be seen from here;
- it was to be released at the end of its task, whatever came: a lease that was left to expire on
  purpose looks the same.

Any other is left to expire, and the log says why.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.concurrency import solo

from celery_dislock.exceptions import StoreError
from celery_dislock.locks.attempt import in_words
from celery_dislock.redaction import reason_of
from celery_dislock.tasks.request import PID_MAX, is_alive

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker import WorkController

    from celery_dislock.locks.runtime import Process, Runtime
    from celery_dislock.servers.replies import Holding

SEARCH_FOR = 5.0  # seconds, after which the locks that were not looked at are left to expire
PING_FOR = 1.0  # seconds for a worker's answer
PINGS = 2  # the first may find it busy
REPLIES = 8  # read for each, at most: one of somebody else's must not end the wait

logger = logging.getLogger("celery_dislock")


class Left(NamedTuple):
    """A lease of a worker with this one's name."""

    lock: str  # its name in Redis
    lease: Holding

    def __str__(self) -> str:
        return f"lock {self.lock} of {in_words(self.lease.holder)}"


def release_left_behind(worker: WorkController, runtime: Runtime[Any]) -> None:
    """
    Release what a dead worker of this one's name holds; blocks for some seconds at most.

    Whatever goes wrong is logged: the leases end with their expiry, and the worker starts.

    Args:
        worker: The worker, which has no pool yet.
        runtime: The locks of its app.
    """
    try:
        _release(worker, runtime.process, _search(worker.hostname, runtime))
    except StoreError as exc:
        logger.warning(
            "Could not release what a worker %s has left behind; it is left to expire: %s",
            worker.hostname,
            exc,
        )
    except Exception:
        logger.exception(
            "Could not release what a worker %s has left behind; it is left to expire.",
            worker.hostname,
        )


def _search(name: str, runtime: Runtime[Any]) -> list[Left]:
    """Find the leases of workers of this name."""
    until = time.monotonic() + SEARCH_FOR
    found: dict[tuple[str, str], Left] = {}
    try:
        for locks in runtime.process.store.all_holders(runtime.settings.dislock_prefix):
            for lock, leases in locks.items():
                for lease in leases:
                    if lease.holder.get("worker") == name and not lease.expiring:
                        found[lock, lease.owner] = Left(lock, lease)
            if time.monotonic() > until:
                logger.info(
                    "Stopped looking for locks that a worker %s has left behind after %g s: "
                    "those that were not found by then are left to expire.",
                    *(name, SEARCH_FOR),
                )
                break
    except StoreError as exc:
        logger.warning(
            "Could not look everywhere for locks that a worker %s has left behind; those that "
            "were not found are left to expire: %s",
            *(name, exc),
        )
    return list(found.values())


def _release(worker: WorkController, process: Process, found: list[Left]) -> None:
    dead: list[Left] = []
    for left in found:
        why = _why_not(worker.app, process, left.lease)
        if why:
            _keep(left, why)
        else:
            dead.append(left)
    why = _why_none(worker) if dead else None
    for left in dead:
        if why:
            _keep(left, why)
        elif process.store.release(
            [left.lock], left.lease.owner, _guard(worker.app, left.lease).options.lock_at_least_for
        ):
            logger.info("Released the %s, which died with its worker.", left)


def _keep(left: Left, why: str) -> None:
    logger.info("The %s is left to expire in %.1f s: %s.", left, left.lease.remaining, why)


def _guard(app: Celery, lease: Holding) -> Any:
    name = lease.holder.get("task")
    return getattr(app.tasks.get(name) if isinstance(name, str) else None, "dislock_guard", None)


def _why_not(app: Celery, process: Process, lease: Holding) -> str | None:
    """Tell why a lease is not to be ended by this worker; None: it may be."""
    host, pid = lease.holder.get("host"), lease.holder.get("pid")
    if host != process.host:
        return "its process was on another machine, and may live there"
    if not isinstance(pid, int) or not 0 < pid <= PID_MAX:
        return "its process is not known"
    # In a container the first process has the same id each time.
    gone = not process.is_own(lease.owner) if pid == os.getpid() else not is_alive(pid)
    if not gone:
        return f"there is a process {pid}"
    guard = _guard(app, lease)
    if guard is None:
        return "this worker does not know that task's lock"
    if not (guard.options.release_on_success and guard.options.release_on_failure):
        return "that task's lock may have been left to expire"
    return None


def _why_none(worker: WorkController) -> str | None:
    """Say why this worker must not end any lease; None: no other worker of its name lives."""
    app, name = worker.app, worker.hostname
    # One of its own, with no part of what is inherited over a fork.
    control = type(app.control)(app)
    control.mailbox.producer_pool = None
    if issubclass(worker.pool_cls, solo.TaskPool):
        return "a worker whose pool is solo answers no ping while it is busy, and may live"
    if not app.conf.worker_enable_remote_control:
        return f"remote control is off, so nobody can tell whether another worker {name} lives"
    try:
        with app.connection_for_write() as connection:
            connection.connect()  # not for ever, where the broker is away
            if not connection.supports_exchange_type("fanout"):
                return "the broker has no remote control, so another worker may live"
            for _ in range(PINGS):
                if control.ping([name], PING_FOR, connection=connection, limit=REPLIES):
                    return f"another worker {name} lives"
    except Exception as exc:  # noqa: BLE001 -- any of the broker's client
        return f"the broker did not tell whether another worker {name} lives: {reason_of(exc)}"
    return None
