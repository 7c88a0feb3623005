"""Turn locks on for an app: ``Dislock(app)``, and ``celery worker --dislock``.

A worker's start-up step writes the command-line options into the app's configuration before any
pool process exists.  All other code reads them from the configuration.

A web process that only sends tasks imports this module, too.  Modules that only a worker or
Celery's command line needs are therefore imported when these ask for a name of this module.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from celery import Celery, current_app
from celery._state import connect_on_app_finalize
from celery.signals import worker_process_init, worker_process_shutdown, worker_shutdown

from celery_dislock import hooks
from celery_dislock.config.censoring import alone, in_place_of_app
from celery_dislock.config.settings import app_settings, apply_options, check_settings
from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.templates import keys_of
from celery_dislock.locks.asynchronous import AsyncLock
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.locks.runtime import Process, Runtime, flush_all
from celery_dislock.operating.telemetry import Telemetry
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.bridge import run_on_loop
from celery_dislock.tasks.answer import Answer
from celery_dislock.tasks.task import SingletonTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from typing import Concatenate

    import click
    from typing_extensions import Self, Unpack

    from celery_dislock.config.plain import PlainOptions
    from celery_dislock.servers.waiters import Place
    from celery_dislock.tasks.declaring import DeclaredOptions, LockedTask, P, R
    from celery_dislock.tasks.handle import LockHandle

logger = logging.getLogger("celery_dislock")


def _with_its_step(context: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Add the worker steps that apply the lock options; a click callback."""
    _follow(context.obj.app)
    return value


def _for_beat(context: click.Context, param: click.Parameter, value: Any) -> None:
    """Apply a lock option of ``celery beat``, which has no steps; a click callback."""
    if value not in (None, ()):
        apply_options(context.obj.app, **{str(param.name): value})


# Steps of a worker, by their modules.
STEPS = {
    "worker": {
        "LockStep": "steps",
        "SweepStep": "steps",
        "StalledStep": "stalled",
        "BodyStep": "bodies",
        "WaitingStep": "waiting",
    },
    "consumer": {"ArrivalStep": "arrivals", "ReconnectStep": "timed"},
}


def __getattr__(name: str) -> Any:
    """
    Return a step, or one of Celery's commands.

    The entry points "worker" and "beat" in the group celery.commands name Celery's own commands.
    They make Celery's command line import this module even if the app does not.  If --dislock were
    unknown, Celery would suggest --discard, which purges the queues.
    """
    if name in ("worker_command", "beat_command"):
        return _command(name.removesuffix("_command"))
    for steps in STEPS.values():
        if name in steps:
            _extend_workers()
            return getattr(import_module(f"celery_dislock.worker.{steps[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


HELP = {
    "worker": "Lock every task that has a lock_key, and check the lock server before starting; or "
    "run all tasks without their locks. Neither: tasks of the class SingletonTask lock.",
    "beat": "Of all beats with this option, let one send, and the others stand by; or send in any "
    "case. Neither: as the setting dislock_enabled says.",
}


@cache
def _command(name: str) -> Any:
    """Return Celery's command of this name, extended by our options."""
    from celery.bin.base import CeleryOption  # noqa: PLC0415 -- see above

    _extend_workers()
    about: dict[str, Any] = {"help_group": "Lock Options", "callback": _with_its_step}
    if name == "beat":
        about |= {"callback": _for_beat, "expose_value": False}
    options = (
        CeleryOption(["--dislock/--no-dislock"], default=None, help=HELP[name], **about),
        CeleryOption(
            ["--dislock-url"],
            default=None,
            metavar="URL",
            multiple=True,
            help="The lock server, in place of the setting dislock_url; given several times, "
            "independent servers of which a majority decides.",
            **about,
        ),
    )
    return hooks.extend_command(name, options)


@cache
def _extend_workers() -> None:
    """Add our commands to those that a worker answers, and extend its beat."""
    from celery.worker.control import control_command, inspect_command  # noqa: PLC0415 -- see above

    from celery_dislock.operating.inspection import (  # noqa: PLC0415
        INSPECT_TASK,
        inspect_locks,
        inspect_task,
    )
    from celery_dislock.tasks.cancelling import LOOK_COMMAND  # noqa: PLC0415
    from celery_dislock.worker.cancelled import renew_if_superseded  # noqa: PLC0415

    # Celery's command line, too, must know the commands, or "celery inspect dislock" is refused.
    inspect_command(name="dislock", variadic="shown", signature="[full]")(inspect_locks)
    control_command(name=LOOK_COMMAND, args=[("task_id", str)])(renew_if_superseded)
    inspect_command(name=INSPECT_TASK, args=[("task_id", str)], signature="ID")(inspect_task)
    hooks.receive_revokes()
    _extend_beats()


@cache
def _extend_beats() -> None:
    """Extend the beats of this process."""
    from celery_dislock.beat import scheduler_of  # noqa: PLC0415 -- see above

    hooks.lead_beats(scheduler_of)


def _extend_if_enabled(sender: Celery, **_kwargs: Any) -> None:
    """Extend a beat that a program starts with ``app.Beat().run()``, which makes the app final."""
    if runtime_of(sender).enabled:
        _extend_beats()


class Dislock:
    """Locks for the tasks of one app.

    Guards all tasks that have a ``lock_key`` if ``dislock_enabled`` is True, and makes locks for
    plain Python.  Create one per app, next to the app::

        app = Celery("shop", broker="redis://localhost:6379/0")
        dislock = Dislock(app)

    Args:
        app: The Celery app.  Two apps in one process share no locks, connections or watchdog.

    Raises:
        SettingsError: *app* is not a Celery app.

    Attributes:
        runtime: What the app's locks share: settings, store and watchdog.
    """

    @alone
    def __init__(self, app: Celery) -> None:
        if not isinstance(app, Celery):
            remedy = "give a Celery app; for locks without one, use Dislock.from_url(url)"
            raise SettingsError("Dislock(app)", "app", in_place_of_app(app), remedy)
        self._app: Celery | None = app
        self.runtime = runtime_of(app)
        _follow(app)
        if app.finalized:  # the signal may have been sent before
            hooks.guard_if_enabled(app)

    @classmethod
    @alone
    def from_url(cls, url: str | Sequence[str], **settings: Any) -> Dislock:
        """
        Make locks for plain Python, without a Celery app or a worker.

        Args:
            url: URL of the lock server, or a list of URLs of independent servers, of which a
                majority decides.
            settings: Settings of the reference page without the prefix ``dislock_``, such as
                ``prefix`` or ``transport_options``, and defaults for :meth:`lock`.

        Raises:
            SettingsError: The URL or a setting cannot be used.
        """
        conf = {"dislock_url": url, **{f"dislock_{name}": v for name, v in settings.items()}}
        check_settings(conf, strict=True)
        app_settings(conf)
        dislock = cls.__new__(cls)
        dislock._app = None  # noqa: SLF001 -- ours
        dislock.runtime = Runtime(lambda: conf)
        return dislock

    if TYPE_CHECKING:

        @overload
        def task(self, fun: Callable[P, R], /) -> LockedTask[P, R]: ...

        @overload
        def task(
            self,
            *,
            bind: Literal[True],
            base: type[SingletonTask] = SingletonTask,
            **options: Unpack[DeclaredOptions],
        ) -> Callable[[Callable[Concatenate[Any, P], R]], LockedTask[P, R]]: ...

        @overload
        def task(
            self,
            *,
            bind: Literal[False] = False,
            base: type[SingletonTask] = SingletonTask,
            **options: Unpack[DeclaredOptions],
        ) -> Callable[[Callable[P, R]], LockedTask[P, R]]: ...

    def task(self, *fun: Any, base: Any = SingletonTask, **options: Any) -> Any:
        """
        Declare a task that locks: ``@app.task(base=SingletonTask, ...)`` with types.

        A type checker refuses an option that is misspelt or has a wrong value, and knows the task's
        arguments and result::

            @dislock.task(lock_key="export:<corp_id>")
            def export(corp_id: int) -> str: ...

        Args:
            fun: The body, if the decorator stands without parentheses.
            base: The task's class: SingletonTask, or one of your own that extends it.
            options: The options of the task, ours and Celery's.  Attributes of other names are for
                ``@app.task``.

        Raises:
            SettingsError: *base* is no SingletonTask, or there is no app.  An option that cannot be
                used raises it when the task is bound.
        """
        if self._app is None:
            remedy = "a task belongs to a Celery app: use Dislock(app)"
            raise SettingsError("Dislock.from_url(...).task(...)", "app", None, remedy)
        if not (isinstance(base, type) and issubclass(base, SingletonTask)):
            remedy = "give SingletonTask, or a class that extends it"
            raise SettingsError("dislock.task(...)", "base", base, remedy)
        return self._app.task(*fun, base=base, **options)

    def lock(self, key: str | Sequence[str], **options: Unpack[PlainOptions]) -> ReentrantLock:
        """
        Make the lock of a key for plain Python: the same lock that tasks with this key take.

        Does not take the lock, and sends no command.  The watchdog keeps the lease alive, and the
        lease has the same signals and errors as a task's.  Of an option that is not given, or None,
        the app's setting for tasks applies, else the default.

        Args:
            key: The key, such as ``export:7``, or a list of keys, of which all or none are taken.
            mode: "exclusive" or "shared": the two sides of a read-write lock.
            limit: Maximum number of exclusive leases at a time, > 0.  None: 1, or with a ``rate``
                any number.
            rate: How often the lock is taken at most, in the whole fleet: "100/m", "5/10s".
            cost: Units of the limit that the lease takes, and starts of the rate that it counts
                for, > 0.  None: 1.
            watchdog_timeout: Expiry of the lease in seconds, > 0, or a timedelta; the default is
                30.  It is renewed after each third of it.
            max_renew_times: Number of renewals after which the lease is left to expire; the default
                is 360.  0 or less: no cap.
            expire: A fixed expiry in seconds, > 0, or a timedelta, instead of the watchdog.
            on_lost: "warn" logs the loss.  "raise" also raises LockLostError in the body of the
                ``with`` block.  None: "warn", whatever the app's setting.
            on_cancel: What happens when a newer task with "cancel" waits for this lock: "raise"
                raises SupersededError in the body of the ``with`` block, "warn" sets
                ``lease.superseded``.  None: nothing.
            timeout: Maximum seconds, >= 0, or a timedelta, that ``with`` waits for the lock before
                it raises LockHeldError.  None: no limit.
            fair: False: pass the waiters in line if the lock admits one more lease.

        Raises:
            SettingsError: An option is unknown, or cannot be used.
            LockKeyError: A key cannot be used, or the list is empty.
        """
        return ReentrantLock(self.runtime, key, options)

    def async_lock(self, key: str | Sequence[str], **options: Unpack[PlainOptions]) -> AsyncLock:
        """
        Make the lock of a key for coroutines: the same lock, owned by an asyncio task.

        Does not take the lock, and sends no command.  A thread of this process renews the lease,
        also while the event loop is blocked.

        Args:
            key: See :meth:`lock`.
            options: See :meth:`lock`; but ``on_lost="raise"``, which is the default here, cancels
                the body of the ``async with`` block, which then ends with LockLostError.

        Raises:
            SettingsError: An option is unknown, or cannot be used.
            LockKeyError: A key cannot be used, or the list is empty.
            ImportError: The extra ``asyncio`` is not installed.
        """
        return AsyncLock(ReentrantLock(self.runtime, key, options, "raise"), self.runtime)

    def lock_of(self, key: str | Sequence[str]) -> LockHandle:
        """
        Return the lock of a key, to look at it and to free it; takes nothing, sends no command.

        The lock of a task and its arguments is ``task.lock_for(...)``.

        Args:
            key: The key, or a list of keys.

        Raises:
            LockKeyError: A key cannot be used, or the list is empty.
        """
        from celery_dislock.tasks.handle import LockHandle  # noqa: PLC0415 -- see above

        return LockHandle(keys_of(key), self.runtime, self._app)

    def hold_back(
        self, key: str | Sequence[str], seconds: float | timedelta, *, note: str = ""
    ) -> None:
        """
        Let nobody in the whole fleet take a lock for some time, as after an answer 429; blocks.

        The same as :meth:`lock_of(key).hold_back(seconds)
        <celery_dislock.tasks.handle.LockHandle.hold_back>`.
        """
        self.lock_of(key).hold_back(seconds, note=note)

    def why(self, task_id: str, *, key: str | Sequence[str] = ()) -> Answer:
        """
        Tell why a task does not run, or that it does; blocks for a second or two.

        Looks at the result backend, the lock server and, if these do not tell, the workers.

        Args:
            task_id: The task's id.
            key: The key of its lock, or a list of keys: only these locks are looked at.  Empty:
                those with parked tasks, and then all.

        Returns:
            The answer.  It says so if nothing is known, or if a server does not answer.

        Raises:
            LockKeyError: A key cannot be used.
        """
        return _why(self._app, task_id, key=key, runtime=self.runtime)

    def place(self, task_id: str, *, key: str | Sequence[str] = ()) -> Place | None:
        """
        Tell where a parked task stands in line, and when it starts; for each view of a page.

        Blocks for one round trip to the result backend, and one to the lock server.

        Args:
            task_id: The task's id.
            key: The key of its lock, or a list of all its keys: then the result backend is not
                asked.  Needed where it does not tell: no backend, ``ignore_result``, ``rpc://``.

        Returns:
            Where it stands; None if it is not in line, as far as is known here.  It has not come to
            a worker yet, runs, waits in a worker's slot, is put off, has ended or is not known, it
            is looked for at other keys than its own, or it was retried ten times and more.

        Raises:
            LockKeyError: A key cannot be used.
            DislockError: The result backend does not tell, and no *key* was given.
            StoreError: The lock server did not answer.
        """
        from celery_dislock.operating.place import place_in_line  # noqa: PLC0415 -- few ask

        return place_in_line(self._app, self.runtime, str(task_id), keys_of(key) if key else ())

    async def async_place(self, task_id: str, *, key: str | Sequence[str] = ()) -> Place | None:
        """Tell what :meth:`place` does, from a thread, so that the event loop is not blocked."""
        return await asyncio.to_thread(self.place, task_id, key=key)

    def close(self) -> None:
        """
        Stop this process's watchdog and close its connections; blocks for 2 s at most.

        Locks that are still held are no longer renewed, which is logged.  A lock that is used
        afterwards gets a new watchdog and new connections.
        """
        self.runtime.close()

    async def aclose(self) -> None:
        """
        Close the connections of this event loop, and all that :meth:`close` does.

        Waits for 2 s at most.  What is used afterwards connects again.
        """
        await run_on_loop(self.runtime.close_here)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _why(
    app: Celery | None,
    task_id: str,
    *,
    key: str | Sequence[str] = (),
    runtime: Runtime[Any] | None = None,
) -> Answer:
    from celery_dislock.operating.why import why  # noqa: PLC0415 -- few processes ask

    return why(app, str(task_id), keys=keys_of(key) if key else (), runtime=runtime)


Answer.find = _why


def _follow(app: Celery) -> None:
    for blueprint, steps in STEPS.items():
        app.steps[blueprint].update(f"{__name__}:{step}" for step in steps)
    for receiver in (hooks.guard_if_enabled, _extend_if_enabled):
        app.on_after_finalize.connect(receiver, weak=False)


Process.watchers = (Telemetry,)

# A spawned (not forked) pool process makes its own app, which has the main process's configuration
# but not its signal handlers.
connect_on_app_finalize(_follow)


def _start_watchdog(**_kwargs: Any) -> None:
    runtime = runtime_of(current_app)
    if runtime.enabled:
        runtime.process.watchdog.start()


worker_process_init.connect(_start_watchdog, weak=False)
# A pool process ends without atexit.
worker_process_shutdown.connect(flush_all, weak=False)
worker_shutdown.connect(flush_all, weak=False)

for command in ("worker", "beat"):
    if f"celery.bin.{command}" in sys.modules:  # the command line, perhaps without our entry points
        _command(command)
