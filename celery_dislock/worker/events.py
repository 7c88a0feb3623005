"""Let the pool processes know whether anybody wants events about tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import bootsteps

from celery_dislock.messages.events import events_of

if TYPE_CHECKING:
    from celery.worker.consumer import Consumer

LOOK_EVERY = 2.0  # seconds: as often as a worker sends its heartbeat


class EventStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """
    Bootstep of a worker's consumer: follows the worker's event dispatcher.

    Each connection to the broker has a new dispatcher.  Monitors turn its events about tasks on and
    off while the worker runs, of which Celery tells nobody.
    """

    label = "Dislock events"
    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, consumer: Consumer, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._events = events_of(consumer.app)
        self._events.share()  # before the pool forks
        self._entry: Any = None

    def start(self, consumer: Consumer) -> None:
        """Follow the dispatcher of this connection."""
        self._events.follow(consumer.event_dispatcher)
        if self._entry is None:
            self._entry = consumer.timer.call_repeatedly(LOOK_EVERY, self._events.look)

    def stop(self, _consumer: Consumer) -> None:
        """Look no more; the next connection starts anew."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None
