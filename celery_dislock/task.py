"""The guard around a task's body, and the base class of tasks that always have it.

A signal handler cannot stop a Celery task, and an override in a user's class can forget its
``super()``.  So the guard is put around whatever ``__call__`` a task class has at the moment the
class is bound to its app, outermost and outside autoretry; acquire, body and release stand in one
function.  The release comes right after the body, before Celery publishes callbacks and the next
step of a chain; ``task_postrun`` is the net below it, for an exception that a signal handler
raised in the middle of the release.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun

from celery_dislock import conflicts
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys import InvalidTemplate, in_order, key_builder
from celery_dislock.leases import Claim, Conflict, Lease, current
from celery_dislock.recovery import execution_start, recovering
from celery_dislock.running import Running, StopTask
from celery_dislock.runtime import Runtime
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
        self._interrupts = (self.options.lock_on_lost, self.options.lock_on_cap) != (
            "warn",
            "expire",
        )

    def run(
        self, task: Task, request: Context, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the body under the task's lock, or end the delivery where it cannot be had."""
        if self.runtime.enabled is False:
            return body(*args, **kwargs)
        lock = self.runtime.lock(self._keys_of(args, kwargs), self.options)
        claim = request.dislock_claim = self._claim(task, request)
        lease = self._take(task, request, lock, claim)
        previous = current.set(lease)
        running = Running(lease) if self._interrupts else None
        try:
            try:
                result = body(*args, **kwargs)
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
            return result
        finally:
            current.reset(previous)
            claim.settle()

    def release_dead(self, args: Any, kwargs: Any, owner_start: str) -> int:
        """
        Release what an execution held whose process has ended; blocks for a round trip.

        Raises:
            StoreError: The lock server did not answer; the lease ends with its expiry.
        """
        if self.runtime.enabled is False:
            return 0
        names = self.runtime.lock_names(self._keys_of(args, kwargs))
        store = self.runtime.process.store
        return store.release_dead(names, owner_start, self.options.lock_at_least_for)

    def _keys_of(self, args: Any, kwargs: Any) -> Sequence[str]:
        return in_order([builder.key(args, kwargs) for builder in self._keys])

    def _take(self, task: Task, request: Context, lock: Lock, claim: Claim) -> Lease:
        try:
            answer = lock.try_acquire(claim)
        except StoreError as exc:
            conflicts.unavailable(task, request, exc)
        except BaseException:  # a signal handler's, perhaps after the server has granted the lock
            if claim.lease is None:
                lock.abandon(claim)
            claim.settle()
            raise
        if isinstance(answer, Conflict):
            conflicts.resolve(task, request, answer, self.options)
        return answer

    def _claim(self, task: Task, request: Context) -> Claim:
        process = self.runtime.process
        holder = {
            "task": task.name,
            "id": request.id,
            "worker": request.hostname,
            "pid": process.pid,
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
    if not issubclass(task, SingletonTask):
        task.lease = property(lease_of)
    request_class = task.Request
    if not isinstance(request_class, property):  # that of a guarded class which this one extends
        task.Request = property(lambda _self: recovering(request_class))
    task_postrun.connect(_settle, dispatch_uid="dislock_settle")


def _settle(task: Task | None = None, **_kwargs: Any) -> None:
    claim = getattr(getattr(task, "request", None), "dislock_claim", None)
    if claim is not None:
        claim.settle()


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
