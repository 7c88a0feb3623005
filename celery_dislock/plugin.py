"""What turns locks on for an app: ``Dislock(app)``, and ``celery worker --dislock``.

The command line writes to the app's configuration, before any pool process exists, and everything
else reads it from there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from celery import Celery, current_app
from celery._state import connect_on_app_finalize
from celery.bin.base import CeleryOption
from celery.bin.worker import worker as worker_command
from celery.signals import worker_process_init

from celery_dislock.config.checks import optional, seconds, yes_or_no
from celery_dislock.config.settings import app_settings, refuse_unknown, task_options
from celery_dislock.config.urls import shown
from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.templates import in_order
from celery_dislock.keys.values import check_key
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.locks.runtime import Runtime
from celery_dislock.tasks.task import guard_tasks, runtime_of
from celery_dislock.worker.arrivals import ArrivalStep
from celery_dislock.worker.steps import LockStep, SweepStep

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import click
    from typing_extensions import Self

logger = logging.getLogger("celery_dislock")


def _with_its_step(context: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Add the step that reads an option wherever the option is read."""
    _follow(context.obj.app)
    return value


OPTIONS = (
    CeleryOption(
        ["--dislock/--no-dislock"],
        default=None,
        callback=_with_its_step,
        help_group="Lock Options",
        help="Lock every task that has a lock_key, and check the lock server before starting; "
        "or run all tasks without their locks. Neither: tasks of the class SingletonTask lock.",
    ),
    CeleryOption(
        ["--dislock-url"],
        default=None,
        metavar="URL",
        multiple=True,
        help_group="Lock Options",
        help="The lock server, in place of the setting dislock_url; given several times, "
        "independent servers of which a majority decides.",
    ),
)


# An entry point of the group celery.commands names this command, so that Celery's command line
# imports this module, whether or not the app does, and gets its own command back.  Without such an
# option Celery would suggest --discard, which purges the queues.
worker_command.params.extend(OPTIONS)


class Dislock:
    """Locks for the tasks of one app.

    Guards all tasks that have a ``lock_key`` where ``dislock_enabled`` is True, and makes locks for
    plain Python.  Make one per app, where the app is made::

        app = Celery("shop", broker="redis://localhost:6379/0")
        dislock = Dislock(app)

    Args:
        app: The app.  Two apps in one process share nothing.

    Raises:
        SettingsError: This is no app.

    Attributes:
        runtime: What its locks share: settings, store and watchdog.
    """

    def __init__(self, app: Celery) -> None:
        if not isinstance(app, Celery):
            remedy = "give a Celery app; for locks without one, use Dislock.from_url(url)"
            told = shown(app) if isinstance(app, (str, list, tuple)) else app
            raise SettingsError("Dislock(app)", "app", told, remedy)
        self.runtime = runtime_of(app)
        _follow(app)

    @classmethod
    def from_url(cls, url: str | Sequence[str], **settings: Any) -> Dislock:
        """
        Make locks for plain Python, without a Celery app or a worker.

        Args:
            url: The lock server; or a list of independent servers, of which a majority decides.
            settings: Settings of the reference page without their ``dislock_``, such as
                ``prefix`` or ``transport_options``; and defaults for :meth:`lock`.

        Raises:
            SettingsError: One of them cannot be used.
        """
        conf = {"dislock_url": url, **{f"dislock_{name}": v for name, v in settings.items()}}
        app_settings(conf)
        dislock = cls.__new__(cls)
        dislock.runtime = Runtime(lambda: conf)
        return dislock

    def lock(  # noqa: PLR0913 -- each option is a parameter of its own
        self,
        key: str | Sequence[str],
        *,
        mode: Literal["exclusive", "shared"] | None = None,
        limit: int | None = None,
        watchdog_timeout: float | timedelta | None = None,
        max_renew_times: int | None = None,
        expire: float | timedelta | None = None,
        on_lost: Literal["warn", "raise"] | None = None,
        timeout: float | timedelta | None = None,
        fair: bool = True,
        **unknown: NoReturn,
    ) -> ReentrantLock:
        """
        Make the lock of a key, for plain Python; the very one that tasks of that key take.

        Asks nobody.  The lease is kept alive by the watchdog, and has the same signals and errors
        as a task's.

        Args:
            key: What the lock is about: ``export:7``; or a list of keys, of which all are taken or
                none.
            mode: "exclusive" or "shared"; as the task option ``lock_mode``, and so for the others.
                None, for each of them: the app's setting, else the default.
            limit: Leases at a time, > 0.
            watchdog_timeout: Expiry of the lease in seconds, > 0, renewed every third of it.
            max_renew_times: Renewals until the lease is left to expire; 0 or less: no cap.
            expire: A fixed expiry in seconds, > 0, instead of the watchdog.
            on_lost: "warn" logs the loss; "raise" also raises LockLostError in the body of the
                ``with`` block, where that can be interrupted.
            timeout: Seconds, >= 0, for which ``with`` waits for the lock, then LockHeldError;
                None: for as long as it takes.
            fair: False: pass those who wait, where the lock admits one more.
            unknown: None is known beside these.

        Raises:
            SettingsError: An option is unknown, or cannot be used.
            LockKeyError: The key cannot, or there is none.
        """
        given = {
            "lock_mode": mode,
            "lock_limit": limit,
            "lock_watchdog_timeout": watchdog_timeout,
            "max_renew_times": max_renew_times,
            "lock_expire": expire,
            "lock_on_lost": on_lost,
        }
        stated = {name: value for name, value in given.items() if value is not None}
        owner = f"lock {key!r}"
        refuse_unknown(owner, unknown, LOCK_OPTIONS)
        try:
            resolved = task_options(owner, stated, self.runtime.conf)
        except SettingsError as exc:
            option = exc.option if exc.owner != owner else exc.option.removeprefix("lock_")
            raise SettingsError(exc.owner, option, exc.value, exc.remedy) from exc
        if resolved.lock_on_lost == "terminate" and on_lost is not None:
            remedy = "use 'warn' or 'raise'; 'terminate' is for tasks"
            raise SettingsError(owner, "on_lost", on_lost, remedy)
        if on_lost is None:  # the app's setting is about its tasks
            resolved = replace(resolved, lock_on_lost="warn")
        try:
            wait_for = optional(seconds(at_least=0))(timeout)
        except ValueError as exc:
            raise SettingsError(owner, "timeout", timeout, str(exc)) from exc
        try:
            yes_or_no(fair)
        except ValueError as exc:
            raise SettingsError(owner, "fair", fair, str(exc)) from exc
        given_keys: Any = key
        several = isinstance(given_keys, Iterable) and not isinstance(given_keys, (str, bytes))
        keys = in_order([check_key(one) for one in (given_keys if several else [given_keys])])
        return ReentrantLock(
            keys, resolved, self.runtime, timeout=wait_for, fair=fair, stated=stated
        )

    def close(self) -> None:
        """
        End the watchdog of this process and close its connections; blocks for a round trip at most.

        Locks that are still held are renewed no more, and the log says so.  What is used afterwards
        is made anew.
        """
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


LOCK_OPTIONS = [
    name
    for name, parameter in inspect.signature(Dislock.lock).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def _guard_if_enabled(sender: Celery, **_kwargs: Any) -> None:
    if runtime_of(sender).enabled:
        try:
            guard_tasks(sender)
        except SettingsError as exc:  # which Celery would log with its traceback
            if not sender.loader.worker_initialized:  # else the start-up step says so, and exits
                logger.error("This process does not lock all tasks with a lock_key: %s", exc)  # noqa: TRY400


def _follow(app: Celery) -> None:
    app.steps["worker"].update((LockStep, SweepStep))
    app.steps["consumer"].add(ArrivalStep)
    app.on_after_finalize.connect(_guard_if_enabled, weak=False)


# A pool process that is spawned, not forked, makes an app of its own, with the configuration of the
# main process's but without its signal handlers.
connect_on_app_finalize(_follow)


def _start_watchdog(**_kwargs: Any) -> None:
    runtime = runtime_of(current_app)
    if runtime.enabled:
        runtime.process.watchdog.start()


worker_process_init.connect(_start_watchdog, weak=False)
