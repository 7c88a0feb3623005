"""The guard around a task's body: it takes the lock, runs the body under it, and releases it.

An exception that a signal handler raises in the middle of the release does not end it.
"""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys.names import execution_start
from celery_dislock.keys.templates import InvalidTemplate, in_order, key_builder, key_of
from celery_dislock.locks.callers import Held, current_caller
from celery_dislock.locks.claim import Claim, Conflict, current
from celery_dislock.locks.running import Running, StopTask
from celery_dislock.messages.headers import Notes, forget_notes, notes_of, own_turn
from celery_dislock.messages.resend import Outbox
from celery_dislock.parking.park import (
    STAYS_IN_LINE,
    Parking,
    acknowledge_unrun,
    delivery_of,
    leave_old_line,
    withdraw,
)
from celery_dislock.tasks import conflicts
from celery_dislock.tasks.redelivery import Copies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Task
    from celery.app.task import Context

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess


# States in which a delivery is over; a body that the worker's end has stopped comes again.
ENDS = (states.FAILURE, states.RETRY, states.IGNORED, states.REJECTED)

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
        runtime: What the locks of the app share.
        options: The task's options.
        timeout: Seconds until a lease of this task expires that is not renewed.
        releases_on_failure: Whether an execution that ends badly frees the lock.
    """

    def __init__(
        self, name: str, task: type[Task], options: TaskOptions, runtime: Runtime[ParkingProcess]
    ) -> None:
        self.options = options
        self.runtime = runtime
        self.timeout = self.options.lock_expire or self.options.lock_watchdog_timeout
        self.releases_on_failure = self.options.release_on_failure
        declared = self.options.lock_key
        try:
            self._keys = [
                key_builder(
                    None if one is False else one, signature=_signature(task), task_name=name
                )
                for one in (declared if isinstance(declared, tuple) else [declared])
            ]
        except InvalidTemplate as exc:
            raise SettingsError(name, "lock_key", declared, str(exc)) from exc
        self._looks_for_copies = (
            self.options.lock_mode == "shared"
            or self.options.lock_limit > 1
            or self.options.lock_dedupe_redelivered
        )
        self._parks = self.options.parks
        self._interrupts = (self.options.lock_on_lost, self.options.lock_on_cap) != (
            "warn",
            "expire",
        )

    def run(
        self, task: Task, request: Context, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the body under the task's lock, or end the delivery where it cannot be had."""
        if self.runtime.off:
            return body(*args, **kwargs)
        lock = self.runtime.lock(self._keys_of(args, kwargs), self.options)
        claim = request.dislock_claim = self._claim(task, request)
        request.dislock_notes = Notes.of(request, self.runtime.settings.dislock_prefix)
        previous = current.set(claim)
        try:
            return self._run(task, request, lock, claim, partial(body, *args, **kwargs))
        finally:
            try:
                claim.settle()  # again, where a signal handler's exception has cut it short
            finally:
                current.reset(previous)

    def _run(
        self, task: Task, request: Context, lock: Lock, claim: Claim, body: Callable[[], Any]
    ) -> Any:
        copies = None
        if self._looks_for_copies and not request.is_eager:
            copies = Copies(task, request, lock, claim, self.runtime.process.store)
        lease = self._take(task, request, lock, claim, copies)
        claim.began = True
        if lease is None:
            return body()
        outbox = request.dislock_outbox = Outbox()
        running = Running(lease) if self._interrupts else None
        caller = current_caller()
        held = Held(lock, claim, lease, execution=True)
        try:
            caller.hold(held)
            try:
                if running is not None:
                    running.begin()
                result = body()
            finally:
                if running is not None:
                    running.end()
        except (Retry, Ignore, Reject) as exc:
            claim.completed = not (isinstance(exc, Reject) and exc.requeue)
            raise
        except StopTask as exc:
            claim.completed = True
            claim.leaves = not self.options.release_on_failure
            raise exc.error from exc
        except BaseException as exc:
            claim.completed = isinstance(exc, Exception)  # any other stops the worker
            claim.leaves = not self.options.release_on_failure
            raise
        else:
            claim.completed = True
            claim.leaves = not self.options.release_on_success
            if copies is not None and self.options.lock_dedupe_redelivered:
                copies.body_succeeded()
                request.dislock_copies = copies
            return result
        finally:
            request.dislock_outbox = None
            caller.forget(held)
            self._keep_for_retry(lock, claim, outbox)
            claim.settle()
            outbox.send()

    def _keep_for_retry(self, lock: Lock, claim: Claim, outbox: Outbox) -> None:
        delay = outbox.retry_in
        lease = claim.lease
        if delay is None or lease is None or not (self.options.lock_hold_on_retry and lease.held):
            return
        held_for = lock.clock() - lease.acquired_at
        until = max(held_for + delay + self.timeout, self.options.lock_at_least_for)
        lock.options = replace(lock.options, lock_at_least_for=until)
        claim.leaves = True
        outbox.held_by = claim.owner

    @property
    def parks(self) -> bool:
        """Whether a delivery of this task may be parked, and so is to bring its message."""
        return self._parks and not self.runtime.off

    def ended(self, request: Context, state: str, retval: Any) -> None:
        """
        Take a parked task out of line that has ended before this guard could claim its turn.

        Its ``before_start`` has raised, or its key cannot be built from its arguments.  What fails
        is set aside.  One whose turn another delivery has claimed goes on.  Never raises; blocks
        for a round trip.
        """
        if state not in ENDS or hasattr(request, "dislock_claim") or not self._can_park:
            return
        turn = self._turn_of(request)
        if turn is None:
            return
        if isinstance(retval, Reject) and retval.requeue:  # the message comes back
            return
        lines = self.runtime.process.lines
        what = f"{request.task}[{turn[1]}]"
        if state == states.FAILURE:
            withdraw(lines, turn, what, retval)
            return
        try:
            lines.withdraw(*turn, delivery_of(request.properties))
        except StoreError as exc:
            logger.error(  # noqa: TRY400 -- the reason says it all
                STAYS_IN_LINE, what, key_of(turn[0]), exc, f"it has ended as {state}"
            )

    @property
    def _can_park(self) -> bool:
        return not self.runtime.off and self.runtime.process.can_park

    def revoked(self, request: Context) -> None:
        """
        Take a parked task that was revoked, or has expired, out of line; blocks for a round trip.

        Raises:
            StoreError: The lock server did not answer; its turn will come, and be revoked again.
        """
        if not self._can_park:
            return
        # Which warns of forged ones.
        noted = Notes.of(request, self.runtime.settings.dislock_prefix).parked
        if noted is not None and noted == self._turn_of(request):
            self.runtime.process.lines.leave(*noted)

    def release_dead(self, args: Any, kwargs: Any, owner_start: str) -> int:
        """
        Release what an execution held whose process has ended; blocks for a round trip.

        With ``release_on_failure`` False its lease is left to expire, and only its place in line is
        given up.

        Returns:
            How many leases were ended.

        Raises:
            StoreError: The lock server did not answer; the lease ends with its expiry.
        """
        if self.runtime.off:
            return 0
        names = self.runtime.lock_names(self._keys_of(args, kwargs))
        store = self.runtime.process.store
        at_least = self.options.lock_at_least_for if self.releases_on_failure else None
        return store.release_dead(names, owner_start, at_least)

    def keys_in_words(self, args: Any, kwargs: Any) -> str:
        """Name the keys of an execution for the log."""
        try:
            return ", ".join(map(repr, self._keys_of(args, kwargs)))
        except Exception as exc:  # noqa: BLE001 -- whatever a user's callable raises
            return f"unknown: {exc!r}"

    def _keys_of(self, args: Any, kwargs: Any) -> Sequence[str]:
        return in_order([builder.key(args, kwargs) for builder in self._keys])

    def _take(
        self, task: Task, request: Context, lock: Lock, claim: Claim, copies: Copies | None
    ) -> Lease | None:
        """Return the lease; None where the body is to run without one."""
        reason = notes_of(request).replaced
        if reason is not None:
            conflicts.end_unrun(task, request, reason)
        parking = None
        ask: Callable[[], Any] = partial(lock.try_acquire, claim)
        turn = self._turn_of(request) if request.headers else None
        can_park = not request.is_eager and self.runtime.process.can_park
        if (self._parks or turn) and can_park and len(lock.names) == 1:
            parking = Parking(task, request, lock, claim, self.runtime.process)
            request.dislock_parking = parking
            ask = parking.ask
        elif turn and can_park:
            ask = partial(self._ask_for_several, task, request, lock, claim, turn)
        lease: Lease | Conflict | None = self._asking(
            task, request, lock, claim, ask, first=bool(request.headers)
        )
        if isinstance(lease, Conflict):
            asking = partial(self._asking, task, request, lock, claim)
            second = conflicts.Second(
                task,
                request,
                self._options_of(request, lock, turn),
                lease,
                wait_in_line=lambda seconds: asking(partial(lock.acquire, claim, timeout=seconds)),
                park=(lambda *told: asking(partial(parking.park, *told))) if parking else None,
            )
            lease = conflicts.resolve(second)
        forget_notes(request)
        if lease is None or copies is None:
            return lease
        try:
            copies.look_for_others()
        except StoreError as exc:
            self._unavailable(task, request, lock, claim.owner, exc)
            return None
        return lease

    def _options_of(
        self, request: Context, lock: Lock, turn: tuple[str, str] | None
    ) -> TaskOptions:
        """Return the options of a delivery: what was parked is not dropped for another strategy."""
        options = self.options
        if turn is None and notes_of(request).retry_until is None:
            return options
        if len(lock.names) > 1:  # no line can be had for several keys: it comes again, and again
            drops = options.lock_on_conflict in {"skip", "raise", "reject"}
            return replace(options, lock_on_conflict="retry") if drops else options
        return replace(options, lock_on_conflict="queue") if turn and not self._parks else options

    def _ask_for_several(
        self, task: Task, request: Context, lock: Lock, claim: Claim, turn: tuple[str, str]
    ) -> Lease | Conflict:
        """Ask for a task that was parked when it had one key."""
        if not leave_old_line(self.runtime.process.lines, request, turn):
            acknowledge_unrun(task, request, lock.key)
        return lock.try_acquire(claim)

    def _turn_of(self, request: Context) -> tuple[str, str] | None:
        return own_turn(request, self.runtime.settings.dislock_prefix)

    def _unavailable(
        self, task: Task, request: Context, lock: Lock, owner: str | None, error: StoreError
    ) -> None:
        self.runtime.process.lock_server_failed(error)
        choice = self.runtime.settings.dislock_on_unavailable
        conflicts.unavailable(task, request, lock.key, error, choice, owner)

    def _asking(
        self,
        task: Task,
        request: Context,
        lock: Lock,
        claim: Claim,
        ask: Callable[[], Any],
        *,
        first: bool = False,
    ) -> Any:
        """Ask for the lock; what the answer is where the server does not give one, is settled."""
        asker = None
        try:
            if first:
                self._give_up(request, lock)
            asker = claim.owner
            if first:
                self._take_over(request, lock, claim)
            answer = ask()
        except StoreError as exc:
            self._unavailable(task, request, lock, asker, exc)
            return None
        except Ignore:  # parked, or a copy: it asked, and got nothing
            self.runtime.process.lock_server_answered()
            raise
        except BaseException:  # a signal handler's, perhaps after the server has granted the lock
            lock.interrupted(claim)
            claim.settle()
            raise
        self.runtime.process.lock_server_answered()
        return answer

    def _give_up(self, request: Context, lock: Lock) -> None:
        """End the leases that earlier deliveries were granted while nobody listened."""
        for owner in notes_of(request).given_up:
            self.runtime.process.store.release(lock.names, owner)

    def _take_over(self, request: Context, lock: Lock, claim: Claim) -> None:
        """Go on with the lease that an earlier delivery has left to this one."""
        left_by = notes_of(request).held_by
        if left_by is None:
            return
        store = self.runtime.process.store
        taken = store.take_over(lock.names, left_by, claim.owner, json.dumps(claim.holder))
        if 0 < taken < len(lock.names):  # to be had all or not at all
            lock.abandon(claim)

    def _claim(self, task: Task, request: Context) -> Claim:
        process = self.runtime.process
        holder = {
            "task": task.name,
            "id": request.id,
            "worker": request.hostname,
            "pid": process.pid,
            "host": process.host,
        }
        start = execution_start(request.id, request.hostname, process.pid)
        return Claim(process.owner_name(start), holder, sender=task)


def _signature(task: type[Task]) -> inspect.Signature:
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])
