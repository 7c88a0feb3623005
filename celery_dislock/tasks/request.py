"""End a delivery whose body was ended from outside: its lock, and its turn.

With prefork, the main process learns that a child is gone, and which task the child was executing.
It knows that execution's owner except for the counter, and computes the key from the arguments in
the message.  The release waits until the process has ended.  A hard time limit is reported before
the child is killed, and a child's own exit may be reported too early as well.

A parked task has claimed its turn, and only Celery knows whether the message comes again: it gives
the message back, or acknowledges it and stores the result.  Therefore the turn ends, or stays for
the copy, when Celery has done so; see :func:`end_turn`.

The release runs in the worker's event loop, in steps that never wait for the child, and wait for
the lock server no longer than the socket timeout.  A thread is not used, because it could be
running while the main process forks the child's replacement.  Workers without an event loop use a
timer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states, worker
from celery.app.task import Context
from celery.platforms import signals
from celery.worker.request import Request
from kombu.asynchronous import get_event_loop

from celery_dislock.exceptions import StoreError, TaskCrashedError
from celery_dislock.keys.names import execution_start, ticket_of_request
from celery_dislock.messages.events import revoked, worker_tells_revoked
from celery_dislock.messages.headers import TICKET, notes_in
from celery_dislock.messages.message import TaskParked, TaskSkipped, keep_message
from celery_dislock.messages.routes import known_here
from celery_dislock.redaction import reason_of
from celery_dislock.servers.requests import DEAD_LETTERED, Ending
from celery_dislock.tasks.cancelling import end_cancelled, why_replaced
from celery_dislock.tasks.crashes import count_crash, is_stopping
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from celery.worker.consumer import Consumer

    from celery_dislock.tasks.guard import Guard

PID_MAX = 2**22  # highest process id on Linux
CHECK_EVERY = 0.05  # seconds between two checks of a process that is about to end
# The state that an event of Celery's has to name if a monitor may know the task in one of our own.
AFTER_OURS = {"task-started": states.STARTED, "task-revoked": states.REVOKED}
# Exceptions with which Celery tells the main process that a pool process has died: by itself, and
# for any reason.
CRASHES = (WorkerLostError, SystemExit, KeyboardInterrupt)
DEATHS = (*CRASHES, Terminated, TimeLimitExceeded)
# The requests whose process was told to end.  For Celery they have ended then, though a body that
# holds the GIL goes on, and so does one that was stopped and goes on later.
told_to_end: WeakSet[Any] = WeakSet()

logger = logging.getLogger("celery_dislock")


class Recovering:
    """
    A part of the class of a task's requests, before a class of Celery's requests.

    The lock of an execution is released when its process dies, and its turn ends unless its message
    comes again.  A task that kills its process fails at its ``lock_crash_limit``.  Those who watch
    the worker are told how a delivery has ended, if Celery does not do so.
    """

    _crash: BaseException | None = None
    _given_back: bool | None = None  # whether it was rejected for its queue; None: not rejected

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.task.dislock_guard.runtime.off:
            keep_message(self, *known_here(self.task.app, self))
        self._was_parked = TICKET in notes_in(self.message.headers)

    def terminate(self: Any, pool: Any, signal: Any = None) -> None:
        """
        End the process, as for a revoke with ``terminate``; its body may go on for a while.

        Celery forgets the request then.  It is kept until the process has ended or the body has, so
        that another signal reaches a process that ignores this one.
        """
        told_to_end.add(self)
        if self._already_revoked:
            pool.terminate_job(self.worker_pid, signals.signum(signal or TERM_SIGNAME))
            return
        super().terminate(pool, signal)  # type: ignore[misc]
        if is_child(self.worker_pid):
            worker.state.requests[self.id] = self

    def cancel(self: Any, *args: Any, **kwargs: Any) -> Any:
        """End the process, as in a cold shutdown; see :meth:`terminate`."""
        told_to_end.add(self)
        return super().cancel(*args, **kwargs)  # type: ignore[misc]

    def on_failure(self: Any, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Release the lock before Celery's own handling, which may requeue the message."""
        told_to_end.discard(self)
        exc = exc_info.exception
        exc = getattr(exc, "exc", exc)
        if isinstance(exc, DEATHS):
            ended = self._died(exc, exc_info, *args, **kwargs)
            end_turn(self)
            return ended
        if isinstance(exc, TaskSkipped):
            self.send_event("task-revoked", **revoked(exc.why))
        elif isinstance(exc, TaskParked):
            self.send_event("task-parked", **exc.about)
            if exc.replaced and self.task.send_events:
                worker_tells_revoked(self.eventer, exc.replaced)
        return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]

    def _died(self: Any, exc: BaseException, *args: Any, **kwargs: Any) -> Any:
        """Release the lock of a process that has died, and let Celery end the delivery."""
        newer = why_replaced(self) if isinstance(exc, WorkerLostError) else ""
        release_after_death(self)
        try:
            if newer:
                end_cancelled(self, newer)
            self._crash = exc if isinstance(exc, CRASHES) and not is_stopping() else None
            return super().on_failure(*args, **kwargs)  # type: ignore[misc]
        except TaskSkipped:  # from end_cancelled()
            return self.on_failure(ExceptionInfo(), *args[1:], **kwargs)
        except TaskCrashedError:  # from reject()
            return super().on_failure(ExceptionInfo(), *args[1:], **kwargs)  # type: ignore[misc]

    def reject(self: Any, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 -- Celery's
        """
        Give the message back, unless its task has killed its process for the last time.

        Raises:
            TaskCrashedError: This was the last time: the task fails instead.
        """
        if requeue and self._crash is not None:
            count_crash(self, self._crash)
        if not self.acknowledged:
            self._given_back = requeue
        super().reject(requeue)  # type: ignore[misc]

    def _retry_worker_lost(self: Any, *args: Any) -> Any:
        """
        Retry as the body does by itself, with ``retry_on_worker_lost`` from Celery 5.7 on.

        What sends a retry takes the notes of this delivery off; it knows it by the running request.
        """
        self.task.request_stack.push(self._context)
        try:
            return super()._retry_worker_lost(*args)  # type: ignore[misc]
        finally:
            self.task.request_stack.pop()

    def on_timeout(self: Any, soft: bool, timeout: float) -> Any:  # noqa: FBT001 -- Celery's
        """
        End the turn of a greenlet that was ended by its hard time limit.

        A pool process is told of as dead before.
        """
        super().on_timeout(soft, timeout)  # type: ignore[misc]
        if not soft and not is_child(self.worker_pid):
            end_turn(self)

    def send_event(self: Any, type: str, **fields: Any) -> None:  # noqa: A002 -- Celery's
        """
        Send an event.  If a monitor may know the task in a state of ours, name the new state.

        Otherwise Celery's State, and so Flower, keeps the state PARKED of a task that starts or is
        revoked at its turn, and LOCK-LOST of a task that is terminated; see :func:`revoked`.
        """
        if (self._was_parked or fields.get("terminated")) and type in AFTER_OURS:
            fields["state"] = AFTER_OURS[type]
        super().send_event(type, **fields)  # type: ignore[misc]


def release_after_death(request: Any) -> None:
    """
    Release the lock of a request whose process has died, or is about to.

    If the process still lives, returns at once, and looks again until it has ended.
    """
    pid = request.worker_pid
    guard = request.task.dislock_guard
    if not is_child(pid):
        return
    key = _keys_in_words(guard, request)
    what = f"the lock of {request.task.name}[{request.id}] (key {key}), whose process {pid} died"
    start, options = execution_start(request.id, request.hostname, pid), guard.options
    ending = Ending(
        expires=not options.release_on_failure, at_least=options.lock_at_least_for, settles=None
    )
    deadline = time.monotonic() + guard.timeout

    def release() -> None:
        try:
            if not is_alive(pid):
                if _release_dead(request, start, ending):
                    #: INFO `Released the lock of … (key …), whose process … died.`: The next task
                    #: can start. -> Find out why the process died: often it ran out of memory.
                    logger.info("Released %s.", what)
            elif time.monotonic() < deadline:
                _soon(release)
        except StoreError as exc:
            #: WARNING `Could not release the lock of … (key …), whose process … died; it is left
            #: to expire: …`: The next task waits for one timeout at most. -> Check the lock server.
            logger.warning("Could not release %s; it is left to expire: %s", what, exc)
        except Exception:
            #: ERROR `Could not release the lock of … (key …), whose process … died; it is left to
            #: expire.`: A `lock_key` callable or this package has a bug. -> See the traceback.
            logger.exception("Could not release %s; it is left to expire.", what)

    release()


def _release_dead(request: Any, owner_start: str, ending: Ending) -> int:
    """
    End the leases and the turn of an execution that was ended from outside.

    Leases that are left to expire are those of ``release_on_failure=False``: only the place in line
    is given up.  Blocks for a round trip.

    Returns:
        The number of leases that were ended.

    Raises:
        StoreError: The lock server did not answer.  The lease ends with its expiry.
        Exception: Any error of a user's callable.
    """
    guard = request.task.dislock_guard
    if guard.runtime.off:
        return 0
    names = guard.runtime.lock_names(guard.keys_of(request))
    ending = ending._replace(ticket=ticket_of_request(Context(request.request_dict)))
    ended: int = guard.runtime.process.store.release_dead(names, owner_start, ending)
    return ended


def end_turn(request: Any) -> None:
    """
    End the turn that a delivery has claimed whose body was ended from outside.

    Called when Celery has stored its end.  Without a turn no copy runs, and none is expected.  If
    the message comes again, as Celery has given it back or left it at its broker, the turn stays
    claimed for it.  Logs an error instead of raising it; blocks for a round trip.
    """
    task, guard, given_back = request.task, request.task.dislock_guard, request._given_back  # noqa: SLF001 -- ours
    comes_again = given_back or not request.acknowledged or request._already_cancelled  # noqa: SLF001
    may_park = guard.options.parks or TICKET in notes_in(request.message.headers)
    if comes_again or not may_park:
        return
    pid = request.worker_pid
    start = (
        execution_start(request.id, request.hostname, pid)
        if is_child(pid)
        else ticket_of_request(Context(request.request_dict))
    )
    settles = 0.0 if given_back is None else DEAD_LETTERED
    try:
        _release_dead(request, start, Ending(expires=True, settles=settles))
    except Exception as exc:  # noqa: BLE001 -- also any error of a user's callable
        #: WARNING `Task … has ended, but a copy of it may run again: …`: The mark of a task that
        #: ran could not be set. -> Check the lock server, if the task must not run twice.
        logger.warning(
            "Task %s[%s] has ended, but a copy of it may run again: %s",
            *(task.name, request.id, reason_of(exc)),
        )


def _keys_in_words(guard: Guard, request: Any) -> str:
    """Name the keys of an execution for the log."""
    try:
        return ", ".join(map(repr, guard.keys_of(request)))
    except Exception as exc:  # noqa: BLE001 -- any error of a user's callable
        return f"unknown: {plain(repr(exc))}"


def _soon(call: Callable[[], None]) -> None:
    loop = get_event_loop()
    if loop is not None:
        loop.call_later(CHECK_EVERY, call)
    else:
        timer = threading.Timer(CHECK_EVERY, call)
        timer.daemon = True
        timer.start()


def is_child(pid: int | None) -> bool:
    """Tell a pool process from this process (thread pools) and from a greenlet's ``id()``."""
    return pid is not None and pid != os.getpid() and pid <= PID_MAX


def is_alive(pid: int) -> bool:
    """Tell whether a process with this id is alive on this machine, under any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Tell whether the process has ended but was not reaped; False if there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "Z"


def waiting(consumer: Consumer, ids: Collection[str]) -> Iterator[Context]:
    """Return the requests of tasks with these ids that wait in a worker, for whatever reason."""
    reserved = worker.state.reserved_requests
    for request in [*reserved, *scheduled(consumer), *rate_limited_requests(consumer)]:
        if request.id in ids and request not in worker.state.active_requests:
            yield request._context  # noqa: SLF001 -- Celery has no public name


def scheduled(consumer: Consumer) -> list[Request]:
    """Return the requests that wait in a worker for their ETA; its timer alone has them."""
    given = [argument for due in consumer.timer.schedule.queue for argument in due.entry.args or ()]
    return [argument for argument in given if isinstance(argument, Request)]


def rate_limited_requests(consumer: Consumer) -> list[Request]:
    """Return the requests that wait in a worker for its ``rate_limit``, Celery's own."""
    buckets = [bucket for bucket in list(consumer.task_buckets.values()) if bucket is not None]
    return [request for bucket in buckets for request, _ in list(bucket.contents)]
