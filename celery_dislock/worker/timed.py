"""A bootstep that does something again and again while the worker runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.worker import state

from celery_dislock.hooks import wrap_methods
from celery_dislock.tasks.request import told_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery.worker import WorkController
    from celery.worker.consumer import Consumer


class TimedStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """
    Bootstep of a worker that works in its timer, which is the event loop if the worker has one.

    The step starts after the pool: a pool without an event loop leaves the timer to a thread, and
    a child that is forked meanwhile inherits what that thread has locked, such as an import.

    Attributes:
        every: Seconds from one piece of work to the next, also after an error.
    """

    every: float

    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._entry: Any = None
        self._turn: object = None  # of the entry that counts; others come and do nothing

    def start(self, worker: WorkController) -> None:
        """Begin, and work at once."""
        self.begin(worker)
        self._again(worker, 0.0)

    def bridge(self, worker: WorkController) -> None:
        """Called when the worker has lost its broker: an event loop waits for it, too."""

    def go_on(self, worker: WorkController) -> None:
        """Work soon, after the worker has lost its broker, and its timer perhaps all entries."""
        if self._entry is not None:
            self._again(worker, 0.0)

    def _again(self, worker: WorkController, after: float) -> None:
        turn = self._turn = object()
        self._entry = worker.timer.call_after(after, self._run, (worker, turn))

    def _run(self, worker: WorkController, turn: object) -> None:
        if turn is not self._turn:
            return
        try:
            self.work()
        finally:  # Celery's timer logs what it raises
            if self._entry is not None and turn is self._turn:  # it was not stopped meanwhile
                self._again(worker, self.every)

    def stop(self, _worker: WorkController) -> None:
        """End, if it was started."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None
            self.end()

    terminate = stop  # in a cold shutdown, too

    def begin(self, worker: WorkController) -> None:
        """Make what the work needs."""
        raise NotImplementedError

    def work(self) -> None:
        """Work once."""
        raise NotImplementedError

    def end(self) -> None:
        """Close what :meth:`begin` has made."""
        raise NotImplementedError


class LastingStep(TimedStep):
    """
    Timed step that works for the tasks that run, as long as any runs.

    A worker that shuts down, or waits for its broker, stops its timer and forks nothing: then a
    thread goes on.  In a soft shutdown Celery waits in a signal handler, above the event loop.
    """

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()  # the time of that thread

    def start(self, worker: WorkController) -> None:
        """Begin, as any timed step."""
        waits = hasattr(worker, "wait_for_soft_shutdown")  # since Celery 5.5
        if waits and worker.use_eventloop:  # else the timer goes on by itself
            wrap_methods(worker, {"wait_for_soft_shutdown": self._stopping})
        super().start(worker)

    def begin(self, worker: WorkController) -> None:  # noqa: ARG002 -- it needs none
        """Work with connections of its own."""
        self.connect()

    def _stopping(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Wrap the first step of a cold shutdown, in which the event loop stands still."""

        @wraps(wait)
        def stop_and_wait() -> None:
            if self._entry is not None:
                self._entry.cancel()
                self._entry = None
                self._last()
            wait()

        return stop_and_wait

    def bridge(self, worker: WorkController) -> None:
        """Go on in a thread while the event loop stands still; nothing is forked meanwhile."""
        if self._entry is not None and worker.use_eventloop:
            self._last()

    def go_on(self, worker: WorkController) -> None:
        """Leave it to the event loop again, unless the worker shuts down."""
        if self._entry is not None:
            self._is_over.set()
            if self._thread is not None:
                self._thread.join()
        super().go_on(worker)

    def end(self) -> None:
        """Go on in a thread while the pool ends its tasks."""
        self._last()

    def _last(self) -> None:
        """Start the thread, with connections of its own: a signal may have interrupted the work."""
        if _is_any_executed() and (self._thread is None or not self._thread.is_alive()):
            self.connect()
            self._is_over.clear()
            name = self.label.lower().replace(" ", "-")
            self._thread = threading.Thread(target=self._work_on, name=name, daemon=True)
            self._thread.start()

    def _work_on(self) -> None:
        while _is_any_executed() and not self._is_over.is_set():
            with suppress(RuntimeError):  # what runs has changed as it was listed
                self.work()
            self._is_over.wait(self.every)

    def connect(self) -> None:
        """Make the connections with which the step works."""
        raise NotImplementedError


def executed() -> Iterator[Any]:
    """Return the requests whose tasks run."""
    return chain(state.active_requests, told_to_end)


def _is_any_executed() -> bool:
    return bool(state.active_requests or told_to_end)


class ReconnectStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """
    Bootstep of a worker's consumer: has the timed steps go on when the broker is there again.

    When the connection is lost, Celery before 5.7 empties the timer, also of what is not its own.
    While a worker with an event loop waits for its broker, its timer stands still.
    """

    label = "Dislock timers"
    requires = ("celery.worker.consumer.connection:Connection",)  # which waits for the broker

    def start(self, consumer: Consumer) -> None:
        """Called at each connection; at the first one, nothing was lost yet."""
        if consumer.restart_count:
            for step in _timed(consumer):
                step.go_on(consumer.controller)

    def stop(self, consumer: Consumer) -> None:
        """Called when the connection is lost, and at the end."""
        for step in _timed(consumer):
            step.bridge(consumer.controller)


def _timed(consumer: Consumer) -> list[TimedStep]:
    return [step for step in consumer.controller.steps if isinstance(step, TimedStep)]
