"""What this package wraps or replaces of Celery's: the only place that does so.

A sender may make no ``Dislock``, and several threads may use a task for the first time at once.
So the functions that send messages are wrapped for all apps, when the package is imported.

=======================================  ======================================================
of Celery's                              is wrapped or replaced because
=======================================  ======================================================
``Celery.send_task``                     every message of a task goes through it: uniqueness
``Signature.set``, ``Task.retry``        an option of a task has no effect there, and is refused
``Control.revoke``, a worker's revoke    a revoked message gives its key back
``filter_hidden_settings``               it hides only the broker's password
``AsyncResult.duplicate``                every result has the attribute
``Backend.mark_as_done`` and the like    a task's key is free before anybody sees that it has ended
``Task.bind``                            each task that locks is guarded when it is made
``pydantic_wrapper``                     a key is made of the models that the body gets
a task class's ``__call__``              the lock is taken around all of the body
its ``apply``, ``on_replace``            uniqueness, and the order of release and replacement
its ``Request``                          the main process learns there that a child has died
options of ``celery worker``, ``beat``   ``--dislock``
``Service.get_scheduler`` of beat        one of several beats sends
a consumer's methods for messages        turns of parked tasks that no guard will see
a worker's ``wait_for_soft_shutdown``    its event loop stands still meanwhile
the logger of ``celery.app.trace``       it repeats our lines
=======================================  ======================================================

Receivers of Celery's signals learn that a task begins and has ended.
:mod:`celery_dislock.tasks.duplicates` makes the class of a duplicate's result.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from functools import cache, partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.app import base as apps
from celery.app import utils
from celery.app.task import Context
from celery.backends.base import Backend
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult
from celery.signals import task_postrun, task_prerun, task_revoked
from celery.states import REVOKED
from celery.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name

from celery_dislock.clock import monotonic
from celery_dislock.config.censoring import reported
from celery_dislock.config.execution import meant_for_tasks, refuse_in_call
from celery_dislock.config.settings import app_settings
from celery_dislock.exceptions import SettingsError
from celery_dislock.messages.delivery import Delivery, running_request
from celery_dislock.messages.message import BY_GUARD, tracks_start
from celery_dislock.parking.process import runtime_of
from celery_dislock.reporting import is_news
from celery_dislock.tasks.keys import validating
from celery_dislock.tasks.sending import Sending, own_reservation, sender_of
from celery_dislock.tasks.task import (
    SingletonTask,
    apply_uniquely,
    custom_call,
    end_unguarded,
    guard_objects,
    is_keyed,
    lease_of,
    lock_for,
    make_guard,
    refuse,
    replace_after_release,
    task_name_of,
    task_named,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from celery.app.control import Control
    from celery.worker import WorkController
    from celery.worker.consumer import Consumer

    from celery_dislock.tasks.guard import Guard

IS_FINAL = "_dislock_is_final"  # attribute of an app all of whose tasks were guarded
BOUND_WITHIN = 1.0  # seconds to wait for another thread to bind a task that is about to be sent

logger = logging.getLogger("celery_dislock")


def _sending_uniquely() -> None:
    """Wrap ``Celery.send_task``, through which all messages of tasks go."""
    original = Celery.send_task
    positional = list(inspect.signature(original).parameters)[4:]

    @wraps(original)
    def send_task(
        self: Celery, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        options.update(zip(positional, more, strict=False))
        publish = partial(original, self, name, args, kwargs)
        if meant_for_tasks(tuple(options)):
            refuse_in_call(name, options)
        task = options.get("task_type") or task_named(self, name)
        guard: Guard | None = getattr(task, "dislock_guard", None)
        if guard is None and task is not None:
            guard = guard_before_sending(task, self)
        if guard is None:
            return publish(**options)
        return Sending(self, task, guard, args, kwargs, publish).send(options)

    Celery.send_task = send_task


def _refusing() -> None:
    """
    Wrap ``Signature.set`` and ``Task.retry``, after which it is too late for an error.

    A later step of a chain is sent when the first has ended, and a retry that cannot be sent ends
    as rejected.
    """
    for cls, name, owner in ((Signature, "set", "task"), (Task, "retry", "name")):
        setattr(cls, name, _refusing_options(getattr(cls, name), owner))


def _refusing_options(original: Callable[..., Any], owner: str) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        refuse_in_call(getattr(self, owner), options)
        return original(self, *args, **options)

    return call


def _controlling() -> None:
    """Wrap revokes as soon as an app is asked for its ``control``, whose import takes long."""
    descriptor = Celery.__dict__["control"]
    original = descriptor.func

    @wraps(original)
    def control(self: Celery) -> Any:
        _revoking()
        return original(self)

    descriptor.func = control
    if "celery.app.control" in sys.modules:
        _revoking()


@cache
def _revoking() -> None:
    """Wrap revokes in the process that sends one."""
    from celery.app.control import Control  # noqa: PLC0415 -- see above

    original = Control.revoke

    @wraps(original)
    def revoke(self: Control, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        sender_of(self.app).revoked(map(str, maybe_list(task_id) or ()))
        return original(self, task_id, *args, **kwargs)

    Control.revoke = revoke


def receive_revokes() -> None:
    """Wrap revokes in a worker that receives them; called once, by workers only."""
    from celery.worker.control import Panel  # noqa: PLC0415 -- other processes have none

    _revoking()
    received = Panel.data["revoke"]

    @wraps(received)
    def on_revoke(control: Any, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        from celery_dislock.tasks.request import waiting  # noqa: PLC0415 -- as above

        for context in waiting(control.consumer, set(maybe_list(task_id) or ())):
            own_reservation(control.app, context).tell("end_waiting")
        return received(control, task_id, *args, **kwargs)

    Panel.data["revoke"] = on_revoke


def _ending() -> None:
    """
    Wrap the methods that store how a task has ended: its key is free before anybody sees the end.

    Celery calls them first at each end but Ignore and Reject: also without a guard or a stored
    result, and in the main process for a child that died.
    """
    for name in ("mark_as_done", "mark_as_failure", "mark_as_revoked"):
        setattr(Backend, name, _freeing_key(getattr(Backend, name)))


def _freeing_key(original: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)[1:]

    @wraps(original)
    def mark(self: Backend, *args: Any, **kwargs: Any) -> Any:
        request = {**dict(zip(names, args, strict=False)), **kwargs}.get("request")
        delivery = Delivery.of(request)
        if isinstance(request, Context) and (delivery is None or delivery.reservation):
            own_reservation(self.app, request).end()
        return original(self, *args, **kwargs)

    return mark


def _following() -> None:
    """Follow every task: one that takes no lock here may have a reservation or a turn."""
    task_prerun.connect(_before_body, weak=False)
    task_postrun.connect(_after_result, weak=False)
    task_revoked.connect(_after_revoke, weak=False)


def _before_body(task: Task, **_kwargs: Any) -> None:
    if getattr(task, "dislock_guard", None) is None:  # a guard tells the server itself
        own_reservation(task.app, task.request).tell("begin_unlocked")


def _after_result(task: Task, state: str, retval: Any, **_kwargs: Any) -> None:
    delivery = Delivery.of(task.request)
    if delivery is None:
        end_unguarded(task.app, task.request, state, retval)
        return
    for call in delivery.after_result:
        call(state)


def _after_revoke(sender: Task, request: Context, **_kwargs: Any) -> None:
    end_unguarded(sender.app, request, REVOKED, None)


def _reporting() -> None:
    """Wrap the function that hides passwords in ``celery report`` and ``inspect conf``."""
    original = utils.filter_hidden_settings

    @wraps(original)
    def filter_hidden_settings(conf: Mapping[Any, Any]) -> dict[Any, Any]:
        shown = {name: reported(str(name), value) for name, value in conf.items()}
        return dict(original(shown))

    utils.filter_hidden_settings = filter_hidden_settings


def _binding() -> None:
    """Wrap ``Task.bind``, by which a task gets its app, so that a class cannot override the lock.

    Celery sends a signal when all tasks of an app are there.  It sends none for a task that is used
    earlier, as in a script or an eager test, or that is declared later, in a module that is
    imported later.
    """
    original = Task.bind.__func__

    @wraps(original)
    def bind(cls: type[Task], app: Celery) -> Celery:
        name, locks = task_name_of(cls, app), issubclass(cls, SingletonTask)
        if name is None and locks:
            # A base class.  Reading its `app`, as `hasattr(SingletonTask, "app")` does, comes here.
            # If it were bound, its subclasses would inherit the current app's settings.
            return app
        bound: Celery = original(cls, app)
        # While the app is made final, all tasks are guarded at once, and errors are logged then.
        comes_alone = not app.finalized or IS_FINAL in vars(app)
        if name and (locks or (comes_alone and is_keyed(cls) and runtime_of(app).enabled)):
            try:
                install(cls, app)
            except SettingsError as exc:  # perhaps of another object of the class
                refuse(exc.owner if exc.owner in app._tasks else name, app, exc)  # noqa: SLF001
                raise
        return bound

    Task.bind = classmethod(bind)


def install(task: type[Task], app: Celery) -> None:
    """
    Put the guard around a task class's ``__call__``, unless it is there or ``lock_key`` is False.

    A signal handler cannot stop a Celery task, and an override in a user's class can forget to call
    ``super()``.  ``__call__`` is outside of everything else, including autoretry.  The lock is
    released right after it, before Celery publishes callbacks and the next step of a chain.

    Celery's own tasks, such as ``celery.chord_unlock``, are guarded only if they have a
    ``lock_key``.  They inherit the app's base class, but are not meant to lock.

    Raises:
        SettingsError: One of the task's options cannot be used.
    """
    name = task_name_of(task, app)
    if name is None or guard_objects(task, app):
        return
    declared = getattr(task, "lock_key", None)
    if declared is False or (declared is None and name.startswith("celery.")):
        if getattr(task, "dislock_guard", None) is not None:  # inherited from a registered task
            task.dislock_guard, task.__call__ = None, custom_call(task) or Task.__call__
            task.track_started = tracks_start(task)
        return
    app_settings(app.conf)
    guard = make_guard(name, task, app)
    task.__call__ = _guarded(guard, custom_call(task))
    _override(task, "apply", apply_uniquely)
    _override(task, "on_replace", replace_after_release)
    if not issubclass(task, SingletonTask):
        task.lease = property(lease_of)
        task.lock_for = lock_for
    task.track_started = BY_GUARD if tracks_start(task) else False
    request_class = task.Request
    if not isinstance(request_class, property):  # not inherited from a guarded class
        task.Request = property(lambda _self: recovering(request_class))
    task.dislock_guard = guard  # last: another thread that sees the guard may use the task at once


def _guarded(of_class: Guard, own_call: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make the ``__call__`` of a guarded task, around a user-defined one if there is one."""

    def __call__(self: Task, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        request = running_request(self)
        if request is None or request.called_directly or Delivery.of(request) is not None:
            return (own_call or Task.__call__)(self, *args, **kwargs)
        guard: Guard = vars(self).get("dislock_guard", of_class)
        body = own_call.__get__(self) if own_call else self.run
        if guard.runtime.off:
            own_reservation(self.app, request).tell("begin_unlocked")
            return guard.run_unlocked(self, request, body, args, kwargs)
        if guard.is_async:
            return guard.run_async(self, request, body, args, kwargs)
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


def _override(task: type[Task], name: str, method: Callable[..., Any]) -> None:
    """
    Override a method of a task class.  The method of its base is looked up at each call.

    *method* takes the overridden method, the task, and the arguments of the call.
    """
    own = getattr(vars(task).get(name), "dislock_inner", vars(task).get(name))

    def call(self: Task, *args: Any, **kwargs: Any) -> Any:
        inner = own.__get__(self) if own is not None else getattr(super(task, self), name)
        if type(self) is not task:  # the task's class extends this one, and has its own override
            return inner(*args, **kwargs)
        return method(inner, self, *args, **kwargs)

    call.dislock_inner = own  # type: ignore[attr-defined]
    call.__name__ = name
    setattr(task, name, call)


@cache
def recovering(base: type | str) -> type:
    """Extend a class of requests, given as class or name: it learns that a child has died."""
    from celery_dislock.tasks.request import Recovering  # noqa: PLC0415 -- workers alone have it

    return type("Request", (Recovering, symbol_by_name(base)), {})


def guard_tasks(app: Celery) -> None:
    """Guard every task that has a ``lock_key``, whatever its base class.

    Raises:
        SettingsError: An option of one of them cannot be used.
    """
    for task in list(app.tasks.values()):
        _guard_if_keyed(task, app)


def _guard_if_keyed(task: Task, app: Celery) -> None:
    """Guard a task if it has a ``lock_key``; raises as :func:`guard_tasks`."""
    if isinstance(task, SingletonTask) or is_keyed(task):
        install(type(task), app)


def guard_before_sending(task: Task, app: Celery) -> Guard | None:
    """
    Guard a task that is about to be sent; return None if it is not to be guarded.

    Celery registers a task before it binds it: waits for another thread that is about to do so.

    Raises:
        SettingsError: One of its options cannot be used.
    """
    if isinstance(task, SingletonTask) or runtime_of(app).enabled:
        until = monotonic() + BOUND_WITHIN
        while task.request_stack is None and monotonic() < until:
            time.sleep(BOUND_WITHIN / 1000)
        _guard_if_keyed(task, app)
    return getattr(task, "dislock_guard", None)


def guard_if_enabled(sender: Celery, **_kwargs: Any) -> None:
    """Guard the tasks of a final app that have a key, under ``dislock_enabled``; logs errors."""
    setattr(sender, IS_FINAL, True)
    if runtime_of(sender).enabled:
        try:
            guard_tasks(sender)
        except SettingsError as exc:  # Celery would log it with a traceback
            if not sender.loader.worker_initialized:  # in a worker the start-up step reports it
                #: ERROR: In a client with `dislock_enabled=True`, an option of a task is wrong;
                #: workers with this code do not start. -> Correct the option.
                logger.error("This process does not lock all tasks with a lock_key: %s", exc)  # noqa: TRY400


def extend_command(name: str, options: Iterable[Any]) -> Any:
    """Give ``celery worker`` or ``celery beat`` our options, and return the command."""
    command = getattr(import_module(f"celery.bin.{name}"), name)  # the command line alone has it
    command.params.extend(options)
    return command


def lead_beats(scheduler_of: Callable[[Celery, Any], type]) -> None:
    """
    Extend the scheduler of beats whose app has locks on, alone or in a worker; called once.

    Args:
        scheduler_of: Extends the class of an app's scheduler.
    """
    from celery.beat import Service  # noqa: PLC0415 -- other processes need none

    original = Service.get_scheduler

    @wraps(original)
    def get_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime_of(self.app).enabled:
            self.scheduler_cls = scheduler_of(self.app, self.scheduler_cls)
        return original(self, *args, **kwargs)

    Service.get_scheduler = get_scheduler


def wrap_methods(of: Consumer | WorkController, wrapping: Mapping[str, Callable[..., Any]]) -> None:
    """Wrap methods of a worker or its consumer; other steps read the consumer's at their start."""
    for name, wrap in wrapping.items():
        setattr(of, name, wrap(getattr(of, name)))


_sending_uniquely()
_refusing()
_controlling()
_ending()
_following()
_reporting()
apps.pydantic_wrapper = validating(apps.pydantic_wrapper)
_binding()
logging.getLogger("celery.app.trace").addFilter(is_news)  # we have logged the same, with reasons
AsyncResult.duplicate = False  # so that a caller can always ask whether a result is another's
