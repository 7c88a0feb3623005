"""A bootstep that does something again and again while the worker runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import bootsteps

if TYPE_CHECKING:
    from celery.worker import WorkController

EVERY = 5.0  # seconds, for a step that says nothing else


class TimedStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """
    Bootstep of a worker that works in its timer, which is the event loop if the worker has one.

    The step starts after the pool: a pool without an event loop leaves the timer to a thread, and
    a child that is forked meanwhile inherits what that thread has locked, such as an import.
    """

    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._entry: Any = None
        self._every = EVERY  # also after an error

    def start(self, worker: WorkController) -> None:
        """Begin, and work as soon as :meth:`begin` says."""
        self._again(worker, self.begin(worker))

    def _again(self, worker: WorkController, after: float) -> None:
        self._entry = worker.timer.call_after(after, self._run, (worker,))

    def _run(self, worker: WorkController) -> None:
        after = self._every
        try:
            after = self.work()
        finally:  # Celery's timer logs what it raises
            if self._entry is not None:  # it was not stopped meanwhile
                self._again(worker, after)

    def stop(self, _worker: WorkController) -> None:
        """End, if it was started."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None
            self.end()

    def begin(self, worker: WorkController) -> float:
        """Make what the work needs; return the seconds until it starts."""
        raise NotImplementedError

    def work(self) -> float:
        """Work; return the seconds until it is due again."""
        raise NotImplementedError

    def end(self) -> None:
        """Close what :meth:`begin` has made."""
        raise NotImplementedError
