"""The base class of tasks that lock, what it declares, and what happens beside its body.

The guard around the body is installed by ``celery_dislock.hooks``.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from celery import Task, states
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.result import EagerResult
from celery.signals import task_postrun, task_prerun

from celery_dislock.config.execution import refuse_in_call
from celery_dislock.config.options import MEANT
from celery_dislock.config.settings import OPTIONS, nearer, task_options
from celery_dislock.exceptions import DislockError, SettingsError
from celery_dislock.keys.signatures import passing
from celery_dislock.locks.lease import NOT_LOCKED, current_lease
from celery_dislock.messages.delivery import Delivery, Traced, outbox_of, running_request, traced
from celery_dislock.messages.headers import notes_of, own_turn
from celery_dislock.messages.message import TaskSkipped
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import ASIDE, ENDED, OVER
from celery_dislock.tasks.answer import Answer
from celery_dislock.tasks.guard import Guard
from celery_dislock.tasks.keys import signature_of
from celery_dislock.tasks.sending import Sending, own_reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.config.terms import Terms
    from celery_dislock.locks.lease import Lease
    from celery_dislock.tasks.duplicates import Sent
    from celery_dislock.tasks.handle import LockHandle


# What becomes of a turn that was not claimed, by the state in which Celery leaves its delivery.
# A task that failed is set aside.  Those that are ENDED may have sent themselves again, so
# copies run.  A task that is stopped with its worker is in no state, and may be redelivered.
LEAVES = {
    states.FAILURE: ASIDE,
    states.REVOKED: OVER,
    **dict.fromkeys((states.SUCCESS, states.RETRY, states.IGNORED, states.REJECTED), ENDED),
}
BATCHES = "celery_batches"
BATCHED = (
    "celery-batches calls the body once for many messages, as a function, which takes no lock: "
    "take it in the body, with `with dislock.lock(key):`, and declare the task with this base "
    "alone, without lock options"
)

logger = logging.getLogger("celery_dislock")


class SingletonTask(Task):  # type: ignore[misc]
    """A task that locks: one execution runs at a time for each key, across all workers.

    Options are declared with the task.  Without a ``lock_key``, the key consists of the task's name
    and a digest of all its arguments::

        @app.task(base=SingletonTask, lock_key="export:<corp_id>")
        def export(corp_id): ...

    Its guard is installed when it is bound to its app; see ``celery_dislock.hooks``.
    """

    abstract = True

    if TYPE_CHECKING:

        def delay(self, *args: Any, **kwargs: Any) -> Sent[Any]:
            """Send the task, unless it is unique and a message of its key is there."""

        def apply_async(
            self,
            args: Sequence[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> Sent[Any]:
            """Send the task as :meth:`delay` does."""

    @property
    def lease(self) -> Lease:
        """The lease of the current execution; falsy if it runs without a lock."""
        return lease_of(self)

    def lock_for(self, *args: Any, **kwargs: Any) -> LockHandle:
        """
        Return a handle of the lock that the task takes for these arguments, to look at and to free.

        Does not take the lock, and sends no command.

        Raises:
            LockKeyError: No key can be built from the arguments.
            SettingsError: The task takes no lock.
        """
        return lock_for(self, *args, **kwargs)

    def why(self, task_id: str, *, key: str | Sequence[str] = ()) -> Answer:
        """
        Tell why a task of this app does not run; see :meth:`celery_dislock.Dislock.why`.

        Args:
            task_id: The task's id.
            key: The key of its lock, or a list of keys.
        """
        return Answer.find(self.app, task_id, key=key)


def lease_of(task: Task) -> Lease:
    """Return the lease of the task's current execution; NOT_LOCKED if it runs without a lock."""
    delivery = Delivery.of(running_request(task))
    return (delivery.attempt.lease if delivery is not None else None) or NOT_LOCKED


def ensure_held() -> None:
    """
    Raise an error if the running task has lost its lock; see :meth:`Lease.ensure_held`.

    Does nothing in a task that runs without its lock: one that is called as a function, or that
    runs while locks are off.

    Raises:
        LockLostError: Another execution may hold the lock by now.
        DislockError: No task runs in this thread.  A thread that a body has started does not know
            the body's lease: give it the lease, and call the lease's method.
    """
    lease = current_lease()
    if lease is not None:
        lease.ensure_held()
    elif get_current_task() is None and traced.get() is None:
        raise DislockError(
            "ensure_held() is for the body of a task, and no task runs in this thread: call the "
            "method of the lease, which a body has as `self.lease`, and a `with` block as "
            "`with dislock.lock(...) as lease`"
        )


def lock_for(task: Task, *args: Any, **kwargs: Any) -> LockHandle:
    """Return the lock that a task takes for these arguments; see SingletonTask.lock_for."""
    from celery_dislock.tasks.handle import LockHandle  # noqa: PLC0415 -- few processes look

    guard = guard_of(task)
    return LockHandle(guard.keys(args, kwargs, task.serializer), guard.runtime, task.app)


def guard_of(task: Task) -> Guard:
    """
    Return the guard of a task.

    A task that is guarded only in workers with ``--dislock`` has no guard in other processes: one
    is made, and not installed.

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
    return make_guard(task.name, type(task), task.app)


def guards_of(app: Celery) -> dict[str, Guard]:
    """Return the guards of an app's tasks, by the tasks' names."""
    guards = {name: getattr(task, "dislock_guard", None) for name, task in app.tasks.items()}
    return {name: guard for name, guard in sorted(guards.items()) if guard is not None}


def terms_said(app: Celery) -> Callable[[str, str], Terms | None]:
    """
    Return a function that tells the terms on which a task takes the lock of a key.

    It takes the task's name and the key.  It returns None if the app does not know the task, if the
    task takes no lock, or if only its arguments tell.
    """
    guards = guards_of(app)

    def said(task: str, key: str) -> Terms | None:
        guard = guards.get(task)
        return guard.terms_at(key) if guard is not None and guard.has_lock else None

    return said


def make_guard(name: str, task: type[Task], app: Celery) -> Guard:
    """Make the guard of a task class.

    Raises:
        SettingsError: One of its options cannot be used.
    """
    for base in task.__mro__:
        if base.__module__.partition(".")[0] == BATCHES:
            raise SettingsError(name, "base", base, BATCHED)
    instance = _registered(app).get(name, task)
    # An object may have options of its own, set when it was made.
    own = {n: value for n, value in vars(instance).items() if instance is not task and n in OPTIONS}
    declared = nearer(declared_options(task), own)
    if "lock_key" in declared and "lock_key" not in own:
        declared["lock_key"] = _lock_key(task, instance)
    return Guard(name, task, task_options(name, declared, app.conf), runtime_of(app))


def _lock_key(task: type[Task], instance: object) -> Any:
    """Return the ``lock_key`` of a task; one that a class defines may be a method of it."""
    owner = next(cls for cls in task.__mro__ if "lock_key" in vars(cls))
    found = vars(owner)["lock_key"]
    if "_decorated" in vars(owner) or not hasattr(found, "__get__"):
        return found
    method = found.__get__(instance, task)
    if callable(found) and callable(method):
        with suppress(ValueError):
            passing(found, signature_of(task), task.__name__)
            return found  # a function that is no method, as `lock_key = lambda corp_id: ...`
    return method


def refuse(name: str, app: Celery, error: SettingsError) -> None:
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


def guard_objects(task: type[Task], app: Celery) -> bool:
    """
    Give the other objects of a guarded class guards of their own; tell whether it has one.

    Each registered object is a task, with a name and options of its own; of a class that
    ``@app.task`` has made there is one.  A guard of another app does not count: Celery binds a
    class to the app that has registered it last.
    """
    there: Guard | None = vars(task).get("dislock_guard")
    if there is None or there.runtime is not runtime_of(app):
        return False
    for other in () if "_decorated" in vars(task) else _registered(app).values():
        own: Guard | None = vars(other).get("dislock_guard")
        is_other = type(other) is task and other.name != there.name
        if is_other and (own is None or own.runtime is not there.runtime):
            other.dislock_guard = make_guard(other.name, task, app)
    return True


def _registered(app: Celery) -> dict[str, Task]:
    """Return an app's registered tasks without finalizing the app, which ``app.tasks`` does."""
    tasks: dict[str, Task] = app._tasks  # noqa: SLF001 -- Celery has no public name
    return tasks


def task_named(app: Celery, name: str) -> Task | None:
    """Return a task that this process knows; makes pending tasks of ``@app.task`` if it must."""
    tasks = _registered(app)  # app.tasks makes them all
    if name not in tasks and app._pending and app.autofinalize and not app.finalized:  # noqa: SLF001
        tasks = app.tasks
    return tasks.get(name)


def is_keyed(task: type[Task] | Task) -> bool:
    """Tell whether a task has a ``lock_key``."""
    return getattr(task, "lock_key", None) is not None


def task_name_of(task: type[Task], app: Celery) -> str | None:
    """Return a task class's name; None for a base class."""
    if task.name is not None:
        return str(task.name)
    # For a task without a name, Celery generates one and stores it in the instance only.
    return next(
        (other.name for other in list(_registered(app).values()) if type(other) is task), None
    )


def end_unguarded(app: Celery, request: Context, state: str, retval: Any) -> None:
    """
    End the reservation and the turn of a delivery that has ended, and that no guard has run.

    Logs a DislockError instead of raising it: the task has another turn later.  Blocks for a round
    trip or two.

    Args:
        app: The app of this process.
        request: The request of the delivery, or one that was made of a message's headers.
        state: The state in which Celery leaves the delivery.
        retval: The error, if there is one.
    """
    if state not in LEAVES or not notes_of(request):
        return
    if isinstance(retval, Reject) and retval.requeue:  # the message will be redelivered
        return
    if state in {states.IGNORED, states.REJECTED}:  # other ends free the key when they are stored
        own_reservation(app, request).end()
    runtime, turn = runtime_of(app), None
    why = retval if state == states.FAILURE else f"it has ended as {state}"
    try:
        turn = own_turn(request, runtime.settings.dislock_prefix)
        if turn is not None and runtime.process.can_park:
            runtime.process.lines.take_out(turn, why, request.task or "", LEAVES[state])
    except DislockError as exc:
        #: WARNING: Its worker has no lock server, so it has another turn later. -> Check the
        #: worker's `dislock_url`.
        logger.warning("Parked task %s cannot be run, and stays in line: %s", turn, exc)


def follow_contexts() -> None:
    """Find requests by context variables, too: a pool that awaits runs bodies elsewhere."""
    task_prerun.connect(_enter, weak=False)
    task_postrun.connect(_leave, weak=False)


def _enter(task: Task, **_kwargs: Any) -> None:
    traced.set(Traced(task, task.request, traced.get()))


def _leave(task: Task, **_kwargs: Any) -> None:
    here = traced.get()
    if here is not None and here.request is task.request:
        traced.set(here.around)


def apply_uniquely(
    apply: Callable[..., Any],
    self: Task,
    args: Any = None,
    kwargs: Any = None,
    *more: Any,
    **options: Any,
) -> Any:
    """Run an eager task, unless a message of its key is there; one that is skipped is REVOKED."""
    options.update(zip(_APPLY_POSITIONAL, more, strict=False))
    refuse_in_call(self.name, options)
    run = partial(apply, args, kwargs)
    sending = Sending(self.app, self, self.dislock_guard, args, kwargs, run, eager=True)
    result = sending.send(options)
    if isinstance(result, EagerResult) and isinstance(result.result, TaskSkipped):
        revoked = TaskRevokedError(result.result.why)  # as a worker stores it
        return EagerResult(result.id, revoked, states.REVOKED, name=self.name)
    return result


def replace_after_release(on_replace: Callable[..., Any], self: Task, signature: Any) -> Any:
    """Hold back the message that replaces a task until the task's lock is released."""
    outbox = outbox_of(self)
    if outbox is not None:
        outbox.replacements.append(partial(on_replace, signature))
        raise Ignore("Replaced by new task")
    delivery = Delivery.of(running_request(self))
    if delivery is not None:  # eager: the replacement runs inside this call
        delivery.settle()
        own = delivery.reservation
        if own and own.live and own.live.until != "expiry":
            own.end()  # the replacement, of the same id, has its own reservation
    return on_replace(signature)


_APPLY_POSITIONAL = list(inspect.signature(Task.apply).parameters)[3:]
# Do not call hasattr() or getattr() on a task class with unknown names: reading `app` binds it.
_OF_EVERY_TASK = {name for cls in SingletonTask.__mro__ for name in vars(cls)}


def declared_options(task: type[Task]) -> dict[str, Any]:
    """Collect the attributes of a task class that are lock options, or may be misspelled ones."""
    found: dict[str, Any] = {}
    for cls in reversed(task.__mro__):
        if cls is not SingletonTask and cls not in Task.__mro__:
            found = nearer(
                found, {n: value for n, value in vars(cls).copy().items() if _is_declared(cls, n)}
            )
    return found


def _is_declared(cls: type, name: str) -> bool:
    if name in OPTIONS:
        return True
    if name == "lock_for":  # a method may have this name; anything else was meant as an option
        return not callable(vars(cls)[name])
    if name.startswith("_") or name in _OF_EVERY_TASK:
        return False
    if name in MEANT:  # a class may have an attribute of this name, and its tasks may set it
        return "_decorated" in vars(cls) and not any(name in vars(base) for base in cls.__mro__[1:])
    # A class body may define methods of any name.  Arguments of a task decorator are all options.
    return "_decorated" in vars(cls) or not callable(vars(cls)[name])


def custom_call(task: type[Task]) -> Callable[..., Any] | None:
    """Return the user-defined ``__call__`` of a task, found in the same way as by Celery."""
    for cls in task.__mro__:
        if cls is Task:
            return None
        if "__call__" in vars(cls):
            call: Callable[..., Any] = vars(cls)["__call__"]
            return getattr(call, "dislock_inner", call)  # do not guard a guard's __call__
    return None
