"""The guard around a task's body, and the base class of tasks that always have it.

A signal handler cannot stop a Celery task, and an override in a user's class can forget its
``super()``.  So the guard is put around whatever ``__call__`` a task class has at the moment the
class is bound to its app, outermost and outside autoretry; acquire, body and release stand in one
function.  The release comes right after the body, before Celery publishes callbacks and the next
step of a chain; an exception that a signal handler raises in the middle of it does not end it.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from celery import Task, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun

from celery_dislock import conflicts
from celery_dislock.copies import Copies
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys import InvalidTemplate, in_order, key_builder
from celery_dislock.leases import Claim, Conflict, Lease, current
from celery_dislock.recovery import execution_start, recovering
from celery_dislock.running import Running, StopTask
from celery_dislock.runtime import Runtime
from celery_dislock.sending import GIVEN_UP_HEADER, HELD_HEADER, Outbox, forget_notes, take_note
from celery_dislock.settings import TaskOptions, app_settings, task_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.locks import Lock


def runtime_of(app: Celery) -> Runtime:
    """Return what the locks of this app share; each app has its own."""
    runtime: Runtime = app.__dict__.setdefault("_dislock_runtime", Runtime(lambda: app.conf))
    return runtime


class SingletonTask(Task):  # type: ignore[misc]
    """A task of which one runs at a time for each key, across all workers.

    Options are declared with the task; without a ``lock_key`` the key is the task's name and a
    digest of all its arguments::

        @app.task(base=SingletonTask, lock_key="export:<corp_id>")
        def export(corp_id): ...
    """

    abstract = True

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Bind the task to its app, and install its guard.

        Raises:
            SettingsError: One of the task's options cannot be used.
        """
        bound = super().bind(app)
        install(cls, app)
        return bound

    @property
    def lease(self) -> Lease | None:
        """The lease under which this execution runs; None where it takes no lock."""
        return lease_of(self)


def lease_of(task: Task) -> Lease | None:
    """Return the lease of the task's current execution."""
    claim = getattr(task.request, "dislock_claim", None)
    return claim.lease if claim is not None else None


class Guard:
    """Takes a task's lock around its body.

    Args:
        task: The task's class, bound to *app*.
        app: The app.

    Raises:
        SettingsError: One of the task's options cannot be used.

    Attributes:
        runtime: What the locks of the app share.
        options: The task's options.
        timeout: Seconds until a lease of this task expires that is not renewed.
        releases_on_failure: Whether an execution that ends badly frees the lock.
    """

    def __init__(self, task: type[Task], app: Celery) -> None:
        app_settings(app.conf)
        self.runtime = runtime_of(app)
        self.options = task_options(task.name, declared_options(task), app.conf)
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
            try:
                return self._run(task, request, lock, claim, partial(body, *args, **kwargs))
            finally:
                claim.settle()
        except BaseException:  # a signal handler's, perhaps, which has cut the release short
            claim.settle()
            raise
        finally:
            current.reset(previous)

    def _run(
        self, task: Task, request: Context, lock: Lock, claim: Claim, body: Callable[[], Any]
    ) -> Any:
        copies = None
        if self._looks_for_copies and not request.is_eager:
            copies = Copies(task, request, lock, claim, self.runtime.process.store)
        lease = self._take(task, request, lock, claim, copies)
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
        except (Retry, Ignore, Reject):
            raise
        except StopTask as exc:
            claim.leaves = not self.options.release_on_failure
            raise exc.error from exc
        except BaseException:
            claim.leaves = not self.options.release_on_failure
            raise
        else:
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

    def _keys_of(self, args: Any, kwargs: Any) -> Sequence[str]:
        return in_order([builder.key(args, kwargs) for builder in self._keys])

    def _take(
        self, task: Task, request: Context, lock: Lock, claim: Claim, copies: Copies | None
    ) -> Lease | None:
        """Return the lease; None where the body is to run without one."""
        answer = partial(self._ask, task, request, lock, claim)
        lease = answer()
        if isinstance(lease, Conflict):
            lease = conflicts.resolve(
                conflicts.Second(task, request, self.options, lease, wait_in_line=answer)
            )
        forget_notes(request)
        if lease is None or copies is None:
            return lease
        try:
            copies.look_for_others()
        except StoreError as exc:
            self._unavailable(task, request, claim, exc)
            return None
        return lease

    def _unavailable(self, task: Task, request: Context, claim: Claim, error: StoreError) -> None:
        self.runtime.process.lock_server_failed(error)
        choice = self.runtime.settings.dislock_on_unavailable
        conflicts.unavailable(task, request, error, choice, claim.owner)

    def _ask(
        self, task: Task, request: Context, lock: Lock, claim: Claim, wait: float | None = None
    ) -> Lease | Conflict | None:
        try:
            if wait is not None:
                return lock.acquire(claim, timeout=wait)
            for owner in take_note(request, GIVEN_UP_HEADER) or ():
                self.runtime.process.store.release(lock.names, owner)
            left_by = take_note(request, HELD_HEADER)
            if left_by is not None:
                self._take_over(lock, claim, left_by)
            answer = lock.try_acquire(claim)
        except StoreError as exc:
            self._unavailable(task, request, claim, exc)
            return None
        except BaseException:  # a signal handler's, perhaps after the server has granted the lock
            if claim.lease is None:
                lock.abandon(claim)
            claim.settle()
            raise
        self.runtime.process.lock_server_answered()
        return answer

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


def install(task: type[Task], app: Celery) -> None:
    """
    Put the guard around a task class's ``__call__``, unless it is there or not wanted.

    Celery's own tasks (``celery.chord_unlock`` and so on) are guarded only where a ``lock_key``
    says so: they inherit the app's base class, but nobody means them.

    Raises:
        SettingsError: One of the task's options cannot be used.
    """
    if task.name is None or "dislock_guard" in vars(task):
        return
    declared = getattr(task, "lock_key", None)
    if declared is False or (declared is None and task.name.startswith("celery.")):
        return
    guard = Guard(task, app)
    own_call = _custom_call(task)

    def __call__(self: Task, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        request = self.request_stack.top
        if request is None or request.called_directly or hasattr(request, "dislock_claim"):
            return (own_call or Task.__call__)(self, *args, **kwargs)
        body = own_call.__get__(self) if own_call else self.run
        return guard.run(self, request, body, args, kwargs)

    __call__.dislock_inner = own_call  # type: ignore[attr-defined]
    task.dislock_guard = guard
    task.__call__ = __call__
    task.apply_async = _retrying_after_release(task.apply_async)
    task.on_replace = _replacing_after_release(task.on_replace)
    if not issubclass(task, SingletonTask):
        task.lease = property(lease_of)
    request_class = task.Request
    if not isinstance(request_class, property):  # that of a guarded class which this one extends
        task.Request = property(lambda _self: recovering(request_class))
    if guard.options.lock_dedupe_redelivered:
        task_postrun.connect(_remember, dispatch_uid="dislock_remember")


def _remember(task: Task, state: str, **_kwargs: Any) -> None:
    copies: Copies | None = getattr(task.request, "dislock_copies", None)
    if copies is not None and state == states.SUCCESS:
        copies.task_succeeded()


def _outbox_of(task: Task) -> Outbox | None:
    """Return the outbox of the body that runs here; None where none does, or an eager one."""
    request = task.request_stack.top
    outbox: Outbox | None = getattr(request, "dislock_outbox", None)
    return outbox if outbox is not None and not request.is_eager else None


def _retrying_after_release(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a body sends under its own id wait for its lock to be free: Task.retry's message."""

    @wraps(apply_async)
    def send(self: Task, *args: Any, **options: Any) -> Any:
        outbox = _outbox_of(self)
        if outbox is None or options.get("task_id") != self.request.id:
            return apply_async(self, *args, **options)
        outbox.add_retry(partial(apply_async, self, *args), options)
        return self.AsyncResult(self.request.id)

    return send


def _replacing_after_release(on_replace: Callable[..., Any]) -> Callable[..., Any]:
    """Let what takes a task's place wait for its lock to be free."""

    @wraps(on_replace)
    def send(self: Task, signature: Any) -> Any:
        outbox = _outbox_of(self)
        if outbox is not None:
            outbox.add_replacement(partial(on_replace, self, signature))
            raise Ignore("Replaced by new task")
        claim = getattr(self.request, "dislock_claim", None)
        if claim is not None:  # eager: what takes the task's place runs here and now
            claim.settle()
        return on_replace(self, signature)

    return send


def declared_options(task: type[Task]) -> dict[str, Any]:
    """Collect the attributes of a task class that are options of ours, or look like it."""
    found: dict[str, Any] = {}
    for cls in reversed(task.__mro__):
        if cls is not SingletonTask and cls not in Task.__mro__:
            found.update(vars(cls))
    options = {f.name for f in fields(TaskOptions)}
    return {
        name: value
        for name, value in found.items()
        if name in options
        or not (name.startswith("_") or callable(value) or hasattr(SingletonTask, name))
    }


def _signature(task: type[Task]) -> inspect.Signature:
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _custom_call(task: type[Task]) -> Callable[..., Any] | None:
    """Return the ``__call__`` that users gave the task, as Celery's tracer looks for it."""
    for cls in task.__mro__:
        if cls is Task:
            return None
        if "__call__" in vars(cls):
            call: Callable[..., Any] = vars(cls)["__call__"]
            return getattr(call, "dislock_inner", call)  # a guard's own is not to be guarded again
    return None
