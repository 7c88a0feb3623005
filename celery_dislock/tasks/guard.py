"""The guard around a task's body: it takes the lock, runs the body, and releases the lock.

The release is completed even if a signal handler raises an exception in the middle of it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from celery.app.task import Context
from celery.exceptions import Retry

from celery_dislock.config.terms import ALONE
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys.names import execution_start, reserved_lock, reserved_name, shown_id
from celery_dislock.keys.templates import in_order, key_of
from celery_dislock.locks.callers import CallerLease, current_caller
from celery_dislock.locks.channel import TRACING
from celery_dislock.locks.interruption import THROWN, Running, StopTask, why_stopped
from celery_dislock.locks.lease import PUT_OFF, Attempt, current
from celery_dislock.locks.lock import Lock
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import (
    NO_NOTES,
    Notes,
    forget_notes,
    own_turn,
    reservation_of,
    sent_of,
)
from celery_dislock.messages.message import BY_GUARD, TaskParked, store_started
from celery_dislock.servers.bridge import in_thread, wait_for
from celery_dislock.servers.records import Conflict, describe
from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.requests import RELEASED
from celery_dislock.servers.reservations import OwnReservation, Phase
from celery_dislock.tasks import conflicts, redelivery
from celery_dislock.tasks.acquisition import Acquisition
from celery_dislock.tasks.cancelling import was_cancelled
from celery_dislock.tasks.endings import COMES_AGAIN, ENDED_EARLY, FAILED, SUCCEEDED, outcome_of
from celery_dislock.tasks.keys import TaskKeys, warn_of_orders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery import Task
    from celery.worker.request import Request

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.config.terms import Terms
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.tasks.endings import Outcome

UNAWAITED = (
    "its body is an `async def`, which this pool does not await: it would run without its lock, if "
    "at all. Use a pool that awaits, such as celery-aio-pool's, or declare a plain function that "
    "calls asyncio.run()"
)
RETURNED = (
    "it returned what has to be awaited, and would run on without its lock: declare it with "
    "`async def`, for a pool that awaits, or as a plain function that calls asyncio.run()"
)
DESCRIBED_MOST = 100  # processes, and timeouts of their tasks, whose description is kept
KEPT_TIMEOUTS = 2  # timeouts for which the reservation of a running task is kept at each renewal
WAITING = {"wait", "queue"}  # strategies with which a task keeps a lock while it waits for the next
WAIT_MOST = 31 * 86400.0  # seconds: no line is kept for longer, so a header that says so is forged

logger = logging.getLogger("celery_dislock")


class Guard:
    """Takes a task's lock around its body.

    Args:
        name: The task's name.
        task: The task's class, bound to its app.
        options: The task's options.
        runtime: What the locks of the app share.

    Raises:
        SettingsError: One of the task's options cannot be used.

    Attributes:
        name: The task's name.
        runtime: What the locks of the app share.
        options: The task's options.
        timeout: Seconds until a lease of this task expires if it is not renewed.
        interval: Seconds between two renewals; None if leases of this task are not renewed.
        kept: Seconds for which the reservation of a task that runs is kept at each renewal.
        is_async: Whether the body is an ``async def``.
    """

    def __init__(
        self, name: str, task: type[Task], options: TaskOptions, runtime: Runtime[ParkingProcess]
    ) -> None:
        bodies = {method: getattr(task, method) for method in ("run", "__call__")}
        for method, body in bodies.items():
            if inspect.isasyncgenfunction(body):
                remedy = "an `async def` with `yield`, which no pool awaits: let it return"
                raise SettingsError(name, method, body, remedy)
        inner = (getattr(body, "dislock_inner", body) for body in bodies.values())
        self.is_async = any(map(inspect.iscoroutinefunction, inner))
        self.name = name
        self.options = options
        self.runtime = runtime
        self.timeout = options.timeout
        self.interval = None if options.lock_limit is None else options.renewal_interval
        self._keys = TaskKeys(name, task, options, runtime)
        self.terms_at = self._keys.terms_at
        self._only_key = self._keys.only
        self._locks, self._terms = options.lock_limit is not None, options.terms
        if options.lock_on_conflict in WAITING:
            warn_of_orders(name, self._keys.declared_order(), runtime.orders)
        # With one lock, the watchdog renews the reservation with the lease.  Otherwise only the
        # worker's main process renews it.
        by_watchdog = self.interval is not None and len(options.keys) == 1
        self.kept = KEPT_TIMEOUTS * self.timeout if by_watchdog else options.lock_unique_for
        self._interrupts = (
            options.lock_on_lost != "warn"
            or options.lock_on_cap != "expire"
            or options.on_cancel is not None
        )

    def run(
        self, task: Task, request: Context, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the body under the task's lock, or end the delivery if the lock cannot be taken."""
        delivery = self._delivery(task, request, args, kwargs)
        previous = current.set(delivery.attempt)
        try:
            return self._run(delivery, partial(body, *args, **kwargs))
        except Replaced as exc:
            conflicts.end_replaced(delivery, exc, self.runtime.process)
        except BaseException as exc:
            if delivery.reservation is not None and not delivery.began:
                own = delivery.reservation
                is_kept = isinstance(exc, (Retry, TaskParked)) or not outcome_of(exc).done
                (own.keep if is_kept else own.end)()  # unless a message that comes later has it
            raise
        finally:
            try:
                delivery.settle()  # completes a release that an exception interrupted
            finally:
                current.reset(previous)

    def run_async(
        self, task: Task, request: Context, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """
        Return an awaitable that runs an ``async def`` body as :meth:`run` does.

        An eager body is run here, by ``asyncio.run()``, and its result is returned.

        Raises:
            SettingsError: The pool of this process does not await bodies.
        """
        if request.is_eager:
            return self.run(task, request, partial(_await_all, body), args, kwargs)
        if self.runtime.unawaited_by is not None:
            raise self.unawaited()
        return self.runtime.on_loop(
            self.run, task, request, partial(_await_here, body), args, kwargs
        )

    def run_unlocked(
        self, task: Task, request: Context, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the body where locks are off; an ``async def`` one as :meth:`run_async` does."""
        if task.track_started is BY_GUARD:
            store_started(task, request)
        if self.is_async and request.is_eager:
            return _await_all(body, *args, **kwargs)
        return body(*args, **kwargs)

    def unawaited(self) -> SettingsError:
        """Make the error of an ``async def`` body that the pool of this process does not await."""
        return SettingsError(self.name, "worker_pool", self.runtime.unawaited_by, UNAWAITED)

    def _run(self, delivery: Delivery, body: Callable[[], Any]) -> Any:
        """Take the lock, run the body, and end the lease as the body's outcome asks for."""
        lease = self._take(delivery)
        delivery.began = delivery.runs = True
        caller, outcome = current_caller(), COMES_AGAIN
        begun = len(caller.leases)
        try:
            if lease is not None:
                caller.hold(CallerLease(delivery.lock, lease, execution=True))
                if self._interrupts:
                    body = partial(_interrupted, lease, body)
            if delivery.task.track_started is BY_GUARD:
                store_started(delivery.task, delivery.request)
            result = body()
            if hasattr(type(result), "__await__"):
                self._refuse_awaitable(result)
            if lease is not None and self.options.lock_dedupe_redelivered and not delivery.is_eager:
                redelivery.body_succeeded(delivery, self.runtime.process.store)
        except BaseException as exc:
            outcome = FAILED if isinstance(exc, StopTask) else outcome_of(exc)
            if lease is not None and was_cancelled(lease, exc):
                outcome, delivery.held_back = ENDED_EARLY, None
                raise Replaced(reserved_name(lease.superseded)) from exc
            if isinstance(exc, StopTask):
                raise exc.error from exc
            raise
        else:
            outcome = SUCCEEDED
            return result
        finally:
            caller.end_body(begun)
            self._end(delivery, lease, outcome)

    def _refuse_awaitable(self, result: Any) -> NoReturn:
        if inspect.iscoroutine(result):
            result.close()
        raise SettingsError(self.name, "run", type(result).__name__, RETURNED)

    def _end(self, delivery: Delivery, lease: Lease | None, outcome: Outcome) -> None:
        """End the lease and the reservation; publish what the body sent under the task's id."""
        delivery.runs = False
        outbox, ending = delivery.held_back, delivery.if_done
        if outcome is not SUCCEEDED:
            ending = outcome.ending(ending, delivery.task)
        if outcome.released_by and not getattr(self.options, outcome.released_by):
            ending = ending._replace(expires=True)
        if outbox is not None and lease is not None and self.options.lock_hold_on_retry:
            kept = outbox.hold(lease, delivery.lock)
            if kept:
                ending = ending._replace(expires=True, at_least=kept)
        own = delivery.reservation
        if own is not None and not outcome.done:  # the task's message comes again
            own.keep()
        if own is not None and own is delivery.attempt.reservation and outbox is None and lease:
            ending = ending._replace(reservation=own.live)
        delivery.ending = ending
        delivery.settle()
        if own is not None and ending.reservation is not None:
            own.phase = Phase.ENDED
        try:
            if outbox is not None:
                delivery.ending = RELEASED  # if the broker is away, it will deliver the task again
                outbox.send(delivery)
                delivery.ending = ending
        finally:
            if own is not None:
                own.end()  # unless a message that was sent has it

    def _take(self, delivery: Delivery) -> Lease | None:
        """Return the lease; None if the body runs without one; raises Replaced if it must not."""
        lease, own = None, delivery.reservation
        asking = Acquisition(delivery, self.runtime) if self._locks else None
        if asking is not None:
            answer = asking.ask()
            lease = conflicts.resolve(asking, answer) if isinstance(answer, Conflict) else answer
            if delivery.notes != NO_NOTES:
                delivery.notes = Notes(sent=delivery.notes.sent)
                forget_notes(delivery.request)
        if own is not None and own.phase is Phase.WAITING and own.live is not None:
            try:
                elsewhere = own.live.lock != reserved_lock(delivery.lock.names)
                delivery.lock.store.reservations.begin(own.live, elsewhere=elsewhere)
                own.begun()
            except StoreError as exc:
                self.runtime.process.lock_server_failed(exc)  # it ends after the body
        return lease if asking is None else asking.end_if_copy(lease)

    def _keys_and_terms(
        self, notes: Notes, args: Any, kwargs: Any, serializer: str
    ) -> tuple[Sequence[str], tuple[Terms, ...]]:
        """
        Return the keys of a delivery, and the terms of each key, or one for all keys.

        A delivery with a turn takes the lock that its task was parked for, even if the code names
        another one by now, and without terms if the code has some for each key.  The lock server
        has to know of the turn: anybody can write into a message that the task has one.
        """
        turn = notes.parked
        try:
            built, each = self._keys.of(args, kwargs, serializer), self._terms
            if self._keys.vary:  # a user's function may ask a database
                each = in_thread(self._keys.terms_of, args, kwargs)
        except Exception as exc:
            if turn is None or isinstance(exc, THROWN) or not self._knows(turn, notes):
                raise
        else:
            keys, terms = self._keys.in_order(built, each)
            if turn is None or keys[0] == key_of(turn[0]) or not self._knows(turn, notes):
                return keys, terms
        is_told = len(self._terms) == 1 and not self._keys.vary
        return [key_of(turn[0])], self._terms if is_told else ()

    def _knows(self, turn: tuple[str, str], notes: Notes) -> bool:
        """Tell whether the lock server knows a turn; True if it does not answer, which is noted."""
        try:
            return self.runtime.process.lines.knows(*turn)
        except StoreError as exc:
            notes.unasked = exc
            return True

    def _delivery(self, task: Task, request: Context, args: Any, kwargs: Any) -> Delivery:
        """Create the Delivery, and attach it to the request."""
        process, notes = self.runtime.process, Notes.of(request)
        if notes.parked is not None and (
            request.is_eager or not self._locks or not process.can_park
        ):
            notes.parked = None
        keys: Sequence[str]
        if self._only_key is not None and notes.parked is None and not request.is_eager:
            keys, terms = [self._only_key(args, kwargs)], self._terms
        else:  # an eager task's arguments have taken no way through a serializer
            serializer = task.serializer if request.is_eager else ""
            keys, terms = self._keys_and_terms(notes, args, kwargs, serializer)
        renewed = None if self.interval is None else self.timeout
        here = _described(process.host, request.hostname, process.pid, renewed)
        start = execution_start(request.id, request.hostname, process.pid)
        attempt = Attempt(
            process.owner_name(start), {"task": task.name, "id": shown_id(request.id), **here}, task
        )
        if self.options.cancels:
            notes.sent = sent_of(request)
        if notes.put_off:
            attempt.how = PUT_OFF
        if notes.since is not None:
            waited = time.time() - notes.since
            attempt.waited = waited if 0 < waited < WAIT_MOST else 0.0
        # A plain body runs in no event loop.
        store = process.store_here if self.is_async else process.store
        names = self.runtime.lock_names(keys)
        lock = Lock(keys, names, self.options, store, watchdog=process.watchdog)
        lock.terms = terms or (ALONE,)
        if TRACING in sys.modules:
            lock.channel.begins(attempt)
        delivery = Delivery(task, request, lock, attempt, notes)
        delivery.heeded = bool(terms)
        if notes.unique is not None:
            stated = self.reservation_of(request)
            delivery.reservation = OwnReservation(stated, delivery.tell)
            if stated is not None and (stated.lock,) == names:
                attempt.reservation = delivery.reservation
        request.dislock_delivery = delivery
        return delivery

    def reservation_of(self, request: Context) -> Reservation | None:
        """Return the reservation that a request's message brings; None if it brings none."""
        kept = self.kept, self.options.lock_unique_for
        return reservation_of(request, self.runtime.settings.dislock_prefix, *kept)

    @property
    def has_lock(self) -> bool:
        """Whether this task takes a lock."""
        return self._locks and not self.runtime.off

    def keys(self, args: Any, kwargs: Any, serializer: str = "") -> Sequence[str]:
        """
        Return the keys that the task locks for these arguments, in the order of their locks.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            serializer: The serializer with which a caller will send the arguments; empty: they
                have come with a message.

        Raises:
            Exception: No keys can be built: LockKeyError, or what a user's callable raises.
        """
        if self._only_key is not None and not serializer:
            return [self._only_key(args, kwargs)]
        return in_order([*chain(*self._keys.of(args, kwargs, serializer))])

    def keys_of(self, request: Request) -> Sequence[str]:
        """
        Return the keys that a worker's request may lock: those of its arguments and of its turn.

        Raises:
            Exception: As for :meth:`keys`.
        """
        turn = self.turn_of(Context(request.request_dict))
        try:
            keys = self.keys(request.args, request.kwargs)
        except Exception:
            if turn is None:
                raise
            keys = []
        return in_order([*keys, *([key_of(turn[0])] if turn else [])])

    def turn_of(self, request: Context) -> tuple[str, str] | None:
        """
        Return the lock and the ticket of the turn that a request brings.

        None if it brings none, or if this process cannot park tasks.
        """
        if self.runtime.off or not self.runtime.process.can_park:
            return None
        return own_turn(request, self.runtime.settings.dislock_prefix)


@lru_cache(DESCRIBED_MOST)
def _described(host: str, worker: str | None, pid: int, timeout: float | None) -> Mapping[str, Any]:
    """Return the part of a holder that describes its process."""
    return describe({"host": host}, worker, pid, timeout)


def _interrupted(lease: Lease, body: Callable[[], Any]) -> Any:
    """Run a body that is stopped when its lease ends, if the options ask for that."""
    running = Running(lease)
    try:
        running.begin()
        return body()
    except asyncio.CancelledError as exc:
        if not running.took_back(exc):
            raise
        raise why_stopped(lease) from exc
    finally:
        try:
            running.end()
        except BaseException:  # a signal handler's exception, at any instruction
            running.end()
            raise


def _await_here(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a body for the asyncio task that awaits this call."""
    result = body(*args, **kwargs)
    return wait_for(result) if inspect.isawaitable(result) else result


def _await_all(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a body in an event loop of its own; blocks."""
    result = body(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
