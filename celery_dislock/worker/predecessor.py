"""Release, when a worker starts, the leases of a dead worker of the same name.

If a worker is killed with all its processes, or its machine loses power, its leases stay until
they expire.  A worker that starts under the same node name does not wait for that.  Once, before
its pool starts, it searches the lock server for leases of its own name and ends them.

Releasing the lock of a live worker would be worse than any wait.  A lease is therefore ended only
if all of these are true:

- The lease's process was on a machine with this host name, and no process with its id exists here.
  This protects a child of a worker that is shutting down, which answers no ping.
- No worker of that name answers a ping on the broker.  This protects a worker in another container
  of the same machine, whose process cannot be seen from here.
- The task always releases its lock at its end.  Otherwise the lease may have been left to expire on
  purpose, which looks the same.

Any other lease is left to expire, and the log says why.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.concurrency import solo

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import reserved_name
from celery_dislock.locks.attempt import in_words
from celery_dislock.redaction import reason_of
from celery_dislock.servers.reservations import Reservation
from celery_dislock.tasks.request import PID_MAX, is_alive

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker import WorkController

    from celery_dislock.locks.runtime import Process, Runtime
    from celery_dislock.servers.replies import Holding

SEARCH_FOR = 5.0  # seconds; locks not found by then are left to expire
PING_FOR = 1.0  # seconds to wait for a worker's reply
PINGS = 2  # a busy worker may miss the first
REPLIES = 8  # messages read per ping, at most: an unrelated one must not end the wait

logger = logging.getLogger("celery_dislock")


class Left(NamedTuple):
    """A lease of a worker with the same name as this worker."""

    lock: str  # the lock's name in Redis
    lease: Holding

    def __str__(self) -> str:
        return f"lock {self.lock} of {in_words(self.lease.holder)}"


def release_left_behind(worker: WorkController, runtime: Runtime[Any]) -> None:
    """
    Release the leases of a dead worker of the same name; blocks for a few seconds at most.

    Errors are logged.  The leases end with their expiry then, and the worker starts anyway.

    Args:
        worker: The worker that starts; it has no pool yet.
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
            continue
        guard = _guard(worker.app, left.lease)
        at_least = guard.options.lock_at_least_for
        if process.store.release([left.lock], left.lease.owner, at_least):
            logger.info("Released the %s, which died with its worker.", left)
        if guard.options.lock_unique_until == "end":
            encoded_id = reserved_name(left.lease.holder.get("id"))
            process.store.reservations.end(Reservation(left.lock, encoded_id))


def _keep(left: Left, why: str) -> None:
    logger.info("The %s is left to expire in %.1f s: %s.", left, left.lease.remaining, why)


def _guard(app: Celery, lease: Holding) -> Any:
    name = lease.holder.get("task")
    return getattr(app.tasks.get(name) if isinstance(name, str) else None, "dislock_guard", None)


def _why_not(app: Celery, process: Process, lease: Holding) -> str | None:
    """Return why this worker must not end a lease; None if it may."""
    host, pid = lease.holder.get("host"), lease.holder.get("pid")
    if host != process.host:
        return "its process was on another machine, and may live there"
    if not isinstance(pid, int) or not 0 < pid <= PID_MAX:
        return "its process is not known"
    # In a container, the first process has the same id at each start.
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
    """Return why this worker must not end any lease; None if no other worker has its name."""
    app, name = worker.app, worker.hostname
    # A new Control: app.control's producer pool may have been inherited over a fork.
    control = type(app.control)(app)
    control.mailbox.producer_pool = None
    if issubclass(worker.pool_cls, solo.TaskPool):
        return "a worker whose pool is solo answers no ping while it is busy, and may live"
    if not app.conf.worker_enable_remote_control:
        return f"remote control is off, so nobody can tell whether another worker {name} lives"
    try:
        with app.connection_for_write() as connection:
            connection.connect()  # limited attempts: the broker may be away
            if not connection.supports_exchange_type("fanout"):
                return "the broker has no remote control, so another worker may live"
            for _ in range(PINGS):
                if control.ping([name], PING_FOR, connection=connection, limit=REPLIES):
                    return f"another worker {name} lives"
    except Exception as exc:  # noqa: BLE001 -- any of the broker's client
        return f"the broker did not tell whether another worker {name} lives: {reason_of(exc)}"
    return None
