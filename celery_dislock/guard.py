"""The guard around a task's body: it takes the lock, runs the body under it, and releases it.

An exception that a signal handler raises in the middle of the release does not end it.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import conflicts
from celery_dislock.claims import Claim, Conflict, current
from celery_dislock.copies import Copies
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys import InvalidTemplate, in_order, key_builder
from celery_dislock.parking import Parking
from celery_dislock.recovery import execution_start
from celery_dislock.running import Running, StopTask
from celery_dislock.sending import (
    GIVEN_UP_HEADER,
    HELD_HEADER,
    REPLACED_HEADER,
    Outbox,
    forget_notes,
    take_note,
    ticket_note,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Task
    from celery.app.task import Context

    from celery_dislock.leases import Lease
    from celery_dislock.locks import Lock
    from celery_dislock.options import TaskOptions
    from celery_dislock.runtime import Runtime


class Guard:
    """Takes a task's lock around its body.

    Args:
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

    def __init__(self, task: type[Task], options: TaskOptions, runtime: Runtime) -> None:
        self.options = options
        self.runtime = runtime
        self.timeout = self.options.lock_expire or self.options.lock_watchdog_timeout
        self.releases_on_failure = self.options.release_on_failure
        declared = self.options.lock_key
        try:
            self._keys = [
                key_builder(
                    None if one is False else one, signature=_signature(task), task_name=task.name
                )
                for one in (declared if isinstance(declared, tuple) else [declared])
            ]
        except InvalidTemplate as exc:
            raise SettingsError(task.name, "lock_key", declared, str(exc)) from exc
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
        try:
            try:
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

    def revoked(self, request: Context) -> None:
        """
        Take a parked task that was revoked, or has expired, out of line; blocks for a round trip.

        Raises:
            StoreError: The lock server did not answer; its turn will come, and be revoked again.
        """
        parked = ticket_note(request)
        if parked and self.parks and self.runtime.process.can_park:
            self.runtime.process.lines.leave(*parked)

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
        reason = take_note(request, REPLACED_HEADER) if request.headers else None
        if reason is not None:
            conflicts.end_unrun(task, request, reason)
        parking = None
        if self._parks and not request.is_eager and self.runtime.process.can_park:
            parking = Parking(task, request, lock, claim, self.runtime.process)
            request.dislock_parking = parking
        ask = parking.ask if parking else partial(lock.try_acquire, claim)
        lease: Lease | Conflict | None = self._asking(
            task, request, lock, claim, ask, first=bool(request.headers)
        )
        if isinstance(lease, Conflict):
            asking = partial(self._asking, task, request, lock, claim)
            second = conflicts.Second(
                task,
                request,
                self.options,
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
            self._unavailable(task, request, lock, claim, exc)
            return None
        return lease

    def _unavailable(
        self, task: Task, request: Context, lock: Lock, claim: Claim, error: StoreError
    ) -> None:
        self.runtime.process.lock_server_failed(error)
        choice = self.runtime.settings.dislock_on_unavailable
        conflicts.unavailable(task, request, lock.key, error, choice, claim.owner)

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
        try:
            if first:
                self._settle_what_was_left(request, lock, claim)
            answer = ask()
        except StoreError as exc:
            self._unavailable(task, request, lock, claim, exc)
            return None
        except Ignore:  # parked, or a copy: it asked, and got nothing
            self.runtime.process.lock_server_answered()
            raise
        except BaseException:  # a signal handler's, perhaps after the server has granted the lock
            if claim.lease is None:
                lock.abandon(claim)
            claim.settle()
            raise
        self.runtime.process.lock_server_answered()
        return answer

    def _settle_what_was_left(self, request: Context, lock: Lock, claim: Claim) -> None:
        """End the leases of earlier deliveries, or go on with them."""
        for owner in take_note(request, GIVEN_UP_HEADER) or ():
            self.runtime.process.store.release(lock.names, owner)
        left_by = take_note(request, HELD_HEADER)
        if left_by is not None:
            self._take_over(lock, claim, left_by)

    def _take_over(self, lock: Lock, claim: Claim, left_by: str) -> None:
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
