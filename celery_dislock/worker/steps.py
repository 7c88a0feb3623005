"""Bootsteps for locks in a worker's start-up and shutdown."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from kombu.asynchronous import get_event_loop, set_event_loop

from celery_dislock.config.settings import app_settings, apply_options, check_servers
from celery_dislock.config.urls import MEMORY
from celery_dislock.exceptions import DislockError, SettingsError
from celery_dislock.hooks import guard_tasks
from celery_dislock.messages.events import worker_tells_revoked
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.sweep import Sweep, interval
from celery_dislock.servers.trial import check_scripts
from celery_dislock.tasks.task import SingletonTask, guards_of, terms_said
from celery_dislock.worker import startup
from celery_dislock.worker.awaiting import check_bodies
from celery_dislock.worker.contract import about_versions
from celery_dislock.worker.timed import TimedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery
    from celery.worker import WorkController

POOL_CHECK_EVERY = 0.25  # seconds
NOT_SHARED = (
    "it is a lock server inside this process, for eager tasks: the processes that send to this "
    "worker, and other workers, would not meet its locks. Give a Redis"
)

logger = logging.getLogger("celery_dislock")


class LockStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Bootstep of a worker: applies the command line options, and checks the lock server.

    The check runs in the constructor, so a worker that must not start has not forked yet.
    """

    label = "Dislock"

    def __init__(
        self,
        worker: WorkController,
        *,
        dislock: bool | None = None,
        dislock_url: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(worker, **kwargs)
        apply_options(worker.app, dislock=dislock, dislock_url=dislock_url)
        del dislock_url  # tracebacks show it
        self._runtime = runtime_of(worker.app)
        self._check: Any = None
        try:
            self.server, self.warnings = check_lock_server(worker.app)
            check_bodies(worker.app, worker.pool_cls)
        except DislockError as exc:
            #: ERROR `Cannot start with locks: …`: An option or setting is wrong; or a worker with
            #: `--dislock` got no answer of the lock server, or a refusal. A beat waits for its
            #: server instead. -> Follow the message; it is on standard error.
            raise SystemExit(
                f"Cannot start with locks: {exc}\nFix that, name another lock server "
                "(--dislock-url or dislock_url), or run without locks (--no-dislock)."
            ) from exc

    def register_with_event_loop(self, worker: WorkController, hub: Any) -> None:
        """Check for dead pool processes more often than Celery does, to release their locks.

        Celery does not always notice at once that a child was killed.  By itself it may take up to
        five seconds.

        Called again when the consumer has lost the broker.  Then kombu, from 5.6 on, has forgotten
        the event loop of this process, which :mod:`celery_dislock.tasks.request` needs.
        """
        if get_event_loop() is None:
            set_event_loop(hub)
        maintain_pool = getattr(worker.pool, "maintain_pool", None)
        if maintain_pool is not None and self.server:
            if self._check is not None:
                self._check.cancel()
            self._check = hub.call_repeatedly(POOL_CHECK_EVERY, maintain_pool)

    def start(self, _worker: WorkController) -> None:
        """Log whether locks are on, and the warnings."""
        if self.server:
            prefix = self._runtime.settings.dislock_prefix
            #: INFO: Which server keeps this worker's locks. -> Workers with other servers or
            #: prefixes do not see each other's locks: compare the line of all.
            logger.info("Locks are on; lock server: %s, prefix: %s", self.server, prefix)
        elif self._runtime.off:
            #: WARNING: They run beside those of other workers. -> Remove the flag.
            logger.warning(
                "LOCKS ARE OFF (--no-dislock): tasks run without their locks in this worker, "
                "and may run at the same time as in other workers."
            )
        for warning in self.warnings:
            logger.warning(warning)


class SweepStep(TimedStep):
    """Bootstep of a worker that locks: sweeps the lines of parked tasks.

    The step also runs if no task of this worker parks.  A task that parked before its options were
    changed may be in line, and the lock may be reserved for it.
    """

    label = "Dislock sweep"

    def include_if(self, worker: WorkController) -> bool:
        """Tell whether this worker has tasks that lock, and tasks can be parked."""
        runtime = runtime_of(worker.app)
        options = [guard.options for guard in guards_of(worker.app).values()]
        every = interval(options)
        self.every = every or 0.0
        self._parks = any(options_of_task.parks for options_of_task in options)
        return every is not None and not runtime.off and runtime.process.can_park

    def begin(self, worker: WorkController) -> None:
        """Sweep one page at a time."""
        process = runtime_of(worker.app).new_process()
        self._sweep = Sweep(process, worker.hostname, self.every, looks_first=not self._parks)
        self._sweep.tell = lambda replaced: worker_tells_revoked(
            worker.consumer.event_dispatcher, replaced
        )
        self._sweep.says = terms_said(worker.app)

    def work(self) -> None:
        """Sweep a page."""
        self.every = self._sweep.step()

    def end(self) -> None:
        """Let another worker sweep."""
        self._sweep.end()


def check_lock_server(app: Celery) -> tuple[str, list[str]]:
    """Guard the tasks and check the lock server, which must answer with ``--dislock``.

    Returns:
        The lock server's URL without its password, or empty if no task locks; and the warnings for
        the worker's log.

    Raises:
        SettingsError: An option of a task cannot be used, or no lock server is configured.
        StoreError: The lock server does not answer, or denies commands that locks need.
        DislockError: Locks would not work with a version of Celery, kombu or redis-py.
    """
    runtime = runtime_of(app)
    if runtime.off:
        return "", []
    app_settings(app.conf)
    for name, guard in guards_of(app).items():  # may be bound before the command line was read
        check_servers(name, guard.options, app.conf)
    if app.conf.get("dislock_url") == MEMORY:
        raise SettingsError("app.conf", "dislock_url", MEMORY, NOT_SHARED)
    warnings = about_versions()
    if runtime.enabled:
        guard_tasks(app)
        warnings += startup.about_server(runtime.process.store.ping())
        check_scripts(runtime.process.store.lock_server, runtime.settings.dislock_prefix)
    warnings += startup.about_tasks(app)
    locks = runtime.enabled or any(
        isinstance(app.tasks[name], SingletonTask) for name in guards_of(app)
    )
    return runtime.process.store.server if locks else "", warnings
