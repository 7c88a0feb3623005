"""The base class of tasks that lock, and the installation of the guard around a task's body.

A signal handler cannot stop a Celery task, and an override in a user's class can forget to call
``super()``.  The guard is therefore put around a task class's ``__call__`` when the class is bound
to its app.  It is outside of everything else, including autoretry.  One function acquires the lock,
runs the body and releases the lock.

The lock is released right after the body, before Celery publishes callbacks and the next step of a
chain.  The release is completed even if a signal handler raises an exception in the middle of it.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click
from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.result import EagerResult
from celery.signals import task_postrun, task_revoked

from celery_dislock import signals
from celery_dislock.config.options import TaskOptions
from celery_dislock.config.settings import app_settings, nearer, task_options
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.runtime import Runtime
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.events import events_of
from celery_dislock.messages.headers import own_turn
from celery_dislock.operating.handle import LockHandle
from celery_dislock.parking.process import ParkingProcess
from celery_dislock.parking.publisher import Publisher
from celery_dislock.reporting import leave_out_what_is_told
from celery_dislock.tasks.guard import Guard
from celery_dislock.tasks.request import recovering

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.locks.lease import Lease
    from celery_dislock.messages.outbox import Outbox


logger = logging.getLogger("celery_dislock")


def runtime_of(app: Celery) -> Runtime[ParkingProcess]:
    """Return the runtime that all locks of this app share; each app has its own."""
    try:
        runtime: Runtime[ParkingProcess] = app.__dict__["_dislock_runtime"]
    except KeyError:
        new = Runtime(lambda: app.conf, partial(ParkingProcess, publisher=Publisher(app)))
        runtime = app.__dict__.setdefault("_dislock_runtime", new)
    return runtime


class SingletonTask(Task):  # type: ignore[misc]
    """A task that locks: one execution runs at a time for each key, across all workers.

    Options are declared with the task.  Without a ``lock_key``, the key consists of the task's name
    and a digest of all its arguments::

        @app.task(base=SingletonTask, lock_key="export:<corp_id>")
        def export(corp_id): ...
    """

    abstract = True

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """
        Bind the task to its app, and install its guard.

        Raises:
            SettingsError: One of the task's options cannot be used.  The task is not registered.
        """
        name = _name_of(cls, app)
        if name is None:
            # A base class.  Reading its `app`, as `hasattr(SingletonTask, "app")` does, comes here.
            # If it were bound, its subclasses would inherit the current app's settings.
            return app
        bound = super().bind(app)
        try:
            install(cls, app)
        except SettingsError as exc:
            _refuse(name, app, exc)
            raise
        return bound

    @property
    def lease(self) -> Lease | None:
        """The lease of the current execution; None if it runs without a lock."""
        return lease_of(self)

    def lock_for(self, *args: Any, **kwargs: Any) -> LockHandle:
        """
        Return the lock that the task takes for these arguments, to look at it and to free it.

        Takes nothing, and sends no command.

        Raises:
            LockKeyError: No key can be built from the arguments.
            SettingsError: The task takes no lock.
        """
        return lock_for(self, *args, **kwargs)


def lease_of(task: Task) -> Lease | None:
    """Return the lease of the task's current execution; None if it runs without a lock."""
    delivery = Delivery.of(task.request)
    return delivery.lease if delivery is not None else None


def lock_for(task: Task, *args: Any, **kwargs: Any) -> LockHandle:
    """Return the lock that a task takes for these arguments; see SingletonTask.lock_for."""
    guard = guard_of(task)
    return LockHandle(guard.keys(args, kwargs), guard.runtime, task.app)


def guard_of(task: Task) -> Guard:
    """
    Return the guard of a task.

    A task that is guarded in workers under ``--dislock`` alone has none here: it is made, and not
    installed.

    Raises:
        SettingsError: The task takes no lock, or one of its options cannot be used.
    """
    guard: Guard | None = getattr(task, "dislock_guard", None)
    if guard is not None:
        return guard
    declared = getattr(task, "lock_key", None)
    if declared is None or declared is False:
        remedy = "the task takes no lock: it has no lock_key, and is no SingletonTask"
        raise SettingsError(task.name, "lock_key", declared, remedy)
    options = task_options(task.name, declared_options(type(task)), task.app.conf)
    return Guard(task.name, type(task), options, runtime_of(task.app))


def install(task: type[Task], app: Celery) -> None:
    """
    Put the guard around a task class's ``__call__``, unless it is there or ``lock_key`` is False.

    Celery's own tasks, such as ``celery.chord_unlock``, are guarded only if they have a
    ``lock_key``.  They inherit the app's base class, but are not meant to lock.

    Raises:
        SettingsError: One of the task's options cannot be used.
    """
    name = _name_of(task, app)
    if name is None or "dislock_guard" in vars(task):
        return
    declared = getattr(task, "lock_key", None)
    if declared is False or (declared is None and name.startswith("celery.")):
        return
    app_settings(app.conf)
    options = task_options(name, declared_options(task), app.conf)
    guard = Guard(name, task, options, runtime_of(app))
    task.dislock_guard = guard
    task.__call__ = _guarded(guard, _custom_call(task))
    task.apply_async = _retrying_after_release(task.apply_async)
    task.on_replace = _replacing_after_release(task.on_replace)
    if not issubclass(task, SingletonTask):
        task.lease = property(lease_of)
        task.lock_for = lock_for
    leave_out_what_is_told()
    request_class = task.Request
    if not isinstance(request_class, property):  # not inherited from a guarded class
        task.Request = property(lambda _self: recovering(request_class))
    # For every guarded task: one that does not park now may have been parked under other options.
    task_revoked.connect(_leave_line, dispatch_uid="dislock_leave_line")
    task_postrun.connect(_after_result, dispatch_uid="dislock_after_result")
    signals.lock_lost.connect(_tell_lost, dispatch_uid="dislock_tell_lost")
    signals.lock_capped.connect(_tell_capped, dispatch_uid="dislock_tell_capped")


def guard_tasks(app: Celery) -> None:
    """Guard every task that has a ``lock_key``, whatever its base class.

    Raises:
        SettingsError: An option of one of them cannot be used.
    """
    for task in list(app.tasks.values()):
        _guard_if_keyed(task, app)


def _guard_if_keyed(task: Task, app: Celery) -> None:
    """Guard a task if it has a ``lock_key``.

    Raises:
        SettingsError: One of its options cannot be used.
    """
    if isinstance(task, SingletonTask) or getattr(task, "lock_key", None) is not None:
        install(type(task), app)


def guard_new(task: Task, app: Celery) -> None:
    """Guard a task that was just made, if it has a ``lock_key``.

    Raises:
        SettingsError: One of its options cannot be used.  The task is not registered any more.
    """
    try:
        _guard_if_keyed(task, app)
    except SettingsError as exc:
        _refuse(task.name, app, exc)
        raise


def _refuse(name: str, app: Celery, error: SettingsError) -> None:
    """Unregister a task whose options cannot be used, and end a command that loads the app.

    Celery registers a task before it binds it, so it could be used without its guard.
    """
    _registered(app).pop(name, None)
    if _command_line_loads_the_app():  # which would show a traceback
        raise SystemExit(error.format_message()) from None


def _command_line_loads_the_app() -> bool:
    """Tell whether Celery's command line is importing the app, whose module uses its tasks."""
    context = click.get_current_context(silent=True)
    return context is not None and context.command.name == "celery" and context.obj is None


def _registered(app: Celery) -> dict[str, Task]:
    """Return an app's registered tasks without finalizing the app, which ``app.tasks`` does."""
    tasks: dict[str, Task] = app._tasks  # noqa: SLF001 -- Celery has no public name
    return tasks


def _name_of(task: type[Task], app: Celery) -> str | None:
    """Return a task class's name; None for a base class."""
    if task.name is not None:
        return str(task.name)
    # For a task without a name, Celery generates one and stores it in the instance only.
    return next((one.name for one in list(_registered(app).values()) if type(one) is task), None)


def _guarded(guard: Guard, own_call: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make the ``__call__`` of a guarded task, around a user-defined one if there is one."""

    def __call__(self: Task, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        request = self.request_stack.top
        if request is None or request.called_directly or Delivery.of(request) is not None:
            return (own_call or Task.__call__)(self, *args, **kwargs)
        body = own_call.__get__(self) if own_call else self.run
        try:
            return guard.run(self, request, body, args, kwargs)
        except (Ignore, Retry, Reject) as exc:
            delivery = Delivery.of(request)
            if delivery is None or delivery.began:  # raised by the body
                raise
            # Without a traceback, whose frames Celery would copy and send to the main process.
            raise exc.with_traceback(None) from None

    __call__.dislock_inner = own_call  # type: ignore[attr-defined]
    return __call__


def _after_result(task: Task, state: str, retval: Any, **_kwargs: Any) -> None:
    request = task.request
    delivery = Delivery.of(request)
    if delivery is not None:
        for call in delivery.after_result:
            call(state)
    elif request.headers:
        guard: Guard | None = getattr(task, "dislock_guard", None)
        if guard is not None:
            guard.ended(request, state, retval)


def _leave_line(sender: Task, request: Context, **_kwargs: Any) -> None:
    guard: Guard | None = getattr(sender, "dislock_guard", None)
    if guard is not None:
        try:
            guard.revoked(request)
        except StoreError as exc:
            lock, _ = own_turn(request, guard.runtime.settings.dislock_prefix) or ("", "")
            logger.warning(
                "Task %s[%s] is revoked and stays in line for lock %r until its next turn: %s",
                *(sender.name, request.id, key_of(lock), exc),
            )


def _tell_lost(sender: object, lease: Lease, reason: str, **_kwargs: Any) -> None:
    action = lease.lock.options.lock_on_lost
    _send_event(sender, "task-lock-lost", lease, reason=reason, action=action)


def _tell_capped(sender: object, lease: Lease, **_kwargs: Any) -> None:
    action, ends_in = lease.lock.options.lock_on_cap, lease.remaining
    _send_event(
        sender, "task-lock-capped", lease, renewals=lease.renewals, ends_in=ends_in, action=action
    )


def _send_event(sender: object, type_: str, lease: Lease, **fields: Any) -> None:
    """Send an event about a running task; nothing about a lock of plain Python."""
    if isinstance(sender, Task) and sender.send_events:
        worker, task_id = lease.holder["worker"], lease.holder["id"]
        events_of(sender.app).send(type_, worker, uuid=task_id, key=lease.key, **fields)


def _outbox_of(task: Task) -> Outbox | None:
    """Return the outbox of the running body; None if no body runs, or if the task is eager."""
    request = task.request_stack.top
    delivery = Delivery.of(request)
    return delivery.outbox if delivery is not None and not delivery.is_eager else None


def _retrying_after_release(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    """Hold back messages that a body sends under its own id, as Task.retry does, until release."""

    @wraps(apply_async)
    def send(self: Task, *args: Any, **options: Any) -> Any:
        outbox = _outbox_of(self)
        if outbox is None or options.get("task_id") != self.request.id:
            result = apply_async(self, *args, **options)
            if isinstance(result, EagerResult):  # all others come from send_task
                result.duplicate = False
            return result
        outbox.add_retry(partial(apply_async, self, *args), options)
        return self.AsyncResult(self.request.id)

    return send


def _replacing_after_release(on_replace: Callable[..., Any]) -> Callable[..., Any]:
    """Hold back the message that replaces a task until the task's lock is released."""

    @wraps(on_replace)
    def send(self: Task, signature: Any) -> Any:
        outbox = _outbox_of(self)
        if outbox is not None:
            outbox.add_replacement(partial(on_replace, self, signature))
            raise Ignore("Replaced by new task")
        delivery = Delivery.of(self.request)
        if delivery is not None:  # eager: the replacement runs inside this call
            delivery.settle()
            if delivery.reservation is not None and delivery.reservation.until == "end":
                delivery.end_reservation()  # the replacement has the same id, and its own
        return on_replace(self, signature)

    return send


_OPTIONS = {f.name for f in fields(TaskOptions)}
# Do not call hasattr() or getattr() on a task class with unknown names: reading `app` binds it.
_OF_EVERY_TASK = {name for cls in SingletonTask.__mro__ for name in vars(cls)}


def declared_options(task: type[Task]) -> dict[str, Any]:
    """Collect the attributes of a task class that are lock options, or may be misspelled ones."""
    found: dict[str, Any] = {}
    for cls in reversed(task.__mro__):
        if cls is not SingletonTask and cls not in Task.__mro__:
            found = nearer(
                found, {n: value for n, value in vars(cls).items() if _is_declared(cls, n)}
            )
    return found


def _is_declared(cls: type, name: str) -> bool:
    if name in _OPTIONS:
        return True
    if name == "lock_for":  # the method, unless somebody takes it for an option
        return not callable(vars(cls)[name])
    if name.startswith("_") or name in _OF_EVERY_TASK:
        return False
    # A class body may define methods of any name.  Arguments of a task decorator are all options.
    return "_decorated" in vars(cls) or not callable(vars(cls)[name])


def _custom_call(task: type[Task]) -> Callable[..., Any] | None:
    """Return the user-defined ``__call__`` of a task, found in the same way as by Celery."""
    for cls in task.__mro__:
        if cls is Task:
            return None
        if "__call__" in vars(cls):
            call: Callable[..., Any] = vars(cls)["__call__"]
            return getattr(call, "dislock_inner", call)  # do not guard a guard's __call__
    return None
