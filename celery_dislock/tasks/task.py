"""The base class of tasks that always lock, and how the guard gets around a body.

A signal handler cannot stop a Celery task, and an override in a user's class can forget its
``super()``.  So the guard is put around whatever ``__call__`` a task class has at the moment the
class is bound to its app, outermost and outside autoretry; acquire, body and release stand in one
function.  The release comes right after the body, before Celery publishes callbacks and the next
step of a chain; an exception that a signal handler raises in the middle of it does not end it.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click
from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun, task_revoked

from celery_dislock.config.options import TaskOptions
from celery_dislock.config.settings import app_settings, nearer, task_options
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.runtime import Runtime
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import own_turn
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
    """Return what the locks of this app share; each app has its own."""
    try:
        runtime: Runtime[ParkingProcess] = app.__dict__["_dislock_runtime"]
    except KeyError:
        new = Runtime(lambda: app.conf, partial(ParkingProcess, publisher=Publisher(app)))
        runtime = app.__dict__.setdefault("_dislock_runtime", new)
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
        """
        Bind the task to its app, and install its guard.

        Raises:
            SettingsError: One of the task's options cannot be used.  The task is not registered.
        """
        name = _name_of(cls, app)
        if name is None:
            # A base class that something has looked at: `hasattr(SingletonTask, "app")` comes here.
            # Were it bound, its subclasses would inherit what the current app has set.
            return app
        bound = super().bind(app)
        try:
            install(cls, app)
        except SettingsError as exc:
            # Celery registers a task and binds it then.  The next use would find it unguarded.
            _registered(app).pop(name, None)
            if _command_line_loads_the_app():  # and would show a traceback
                raise SystemExit(exc.format_message()) from None
            raise
        return bound

    @property
    def lease(self) -> Lease | None:
        """The lease under which this execution runs; None where it takes no lock."""
        return lease_of(self)


def lease_of(task: Task) -> Lease | None:
    """Return the lease of the task's current execution."""
    delivery = Delivery.of(task.request)
    return delivery.lease if delivery is not None else None


def install(task: type[Task], app: Celery) -> None:
    """
    Put the guard around a task class's ``__call__``, unless it is there or not wanted.

    Celery's own tasks (``celery.chord_unlock`` and so on) are guarded only where a ``lock_key``
    says so: they inherit the app's base class, but nobody means them.

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
    leave_out_what_is_told()
    request_class = task.Request
    if not isinstance(request_class, property):  # that of a guarded class which this one extends
        task.Request = property(lambda _self: recovering(request_class))
    # Of all of them: a task may have been parked before it was declared in another way.
    task_revoked.connect(_leave_line, dispatch_uid="dislock_leave_line")
    task_postrun.connect(_after_result, dispatch_uid="dislock_after_result")


def guard_tasks(app: Celery) -> None:
    """Guard every task that has a ``lock_key``, whatever its base class.

    Raises:
        SettingsError: An option of one of them cannot be used.
    """
    for task in list(app.tasks.values()):
        if isinstance(task, SingletonTask) or getattr(task, "lock_key", None) is not None:
            install(type(task), app)


def _command_line_loads_the_app() -> bool:
    """Tell whether Celery's command line is importing an app: a module that uses its own tasks."""
    context = click.get_current_context(silent=True)
    return context is not None and context.command.name == "celery" and context.obj is None


def _registered(app: Celery) -> dict[str, Task]:
    """Return an app's tasks as they are now; ``app.tasks`` would make them final first."""
    tasks: dict[str, Task] = app._tasks  # noqa: SLF001 -- there is no other way
    return tasks


def _name_of(task: type[Task], app: Celery) -> str | None:
    """Return a task class's name; None for a base class."""
    if task.name is not None:
        return str(task.name)
    # Celery gives a task without a name one of its own, which it keeps in the instance.
    return next((one.name for one in list(_registered(app).values()) if type(one) is task), None)


def _guarded(guard: Guard, own_call: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make the ``__call__`` of a guarded task around the one that users gave it, if any."""

    def __call__(self: Task, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        request = self.request_stack.top
        if request is None or request.called_directly or Delivery.of(request) is not None:
            return (own_call or Task.__call__)(self, *args, **kwargs)
        body = own_call.__get__(self) if own_call else self.run
        try:
            return guard.run(self, request, body, args, kwargs)
        except (Ignore, Retry, Reject) as exc:
            delivery = Delivery.of(request)
            if delivery is None or delivery.began:  # the body's own
                raise
            # Celery would copy each frame, and send them all to the main process.
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


def _outbox_of(task: Task) -> Outbox | None:
    """Return the outbox of the body that runs here; None where none does, or an eager one."""
    request = task.request_stack.top
    delivery = Delivery.of(request)
    return delivery.outbox if delivery is not None and not delivery.is_eager else None


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
        delivery = Delivery.of(self.request)
        if delivery is not None:  # eager: what takes the task's place runs here and now
            delivery.settle()
        return on_replace(self, signature)

    return send


_OPTIONS = {f.name for f in fields(TaskOptions)}
# Never ask a task class with hasattr() or getattr() for names that are not known: `app` binds it.
_OF_EVERY_TASK = {name for cls in SingletonTask.__mro__ for name in vars(cls)}


def declared_options(task: type[Task]) -> dict[str, Any]:
    """Collect the attributes of a task class that are options of ours, or look like it."""
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
    if name.startswith("_") or name in _OF_EVERY_TASK:
        return False
    # A class body may define methods of any name; to a decorator all that is given is options.
    return "_decorated" in vars(cls) or not callable(vars(cls)[name])


def _custom_call(task: type[Task]) -> Callable[..., Any] | None:
    """Return the ``__call__`` that users gave the task, as Celery's tracer looks for it."""
    for cls in task.__mro__:
        if cls is Task:
            return None
        if "__call__" in vars(cls):
            call: Callable[..., Any] = vars(cls)["__call__"]
            return getattr(call, "dislock_inner", call)  # a guard's own is not to be guarded again
    return None
