"""Locks without Celery: a store and a watchdog as a process has them, and all that they report."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock import signals
from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.lease import Attempt, Conflict, Lease
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

PATIENCE = 30.0  # seconds; far beyond what any condition takes on an idle machine
POLL_INTERVAL = 0.005  # seconds

_numbers = count(1)


def wait_for(
    condition: Callable[[], Any], what: str = "the condition", within: float = PATIENCE
) -> Any:
    """Wait until *condition* gives something true, and return that."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {within:g} s"
        time.sleep(POLL_INTERVAL)
    return found


class Event(NamedTuple):
    """A signal that was sent."""

    name: str
    lease: Lease | None
    arguments: Mapping[str, Any]
    held: bool  # whether the lease was, at that moment


class Holding:
    """
    What one process needs to hold locks, and the signals that come of it, in their order.

    Args:
        url: The lock server.
        transport: Options of its connections.
        watchdog: Something else than a real one, to keep the leases.
    """

    def __init__(
        self, url: str, transport: Mapping[str, Any] | None = None, watchdog: Any = None
    ) -> None:
        self.store = Store(url, transport)
        self.watchdog = watchdog or Watchdog(self.store)
        self.sender = self  # of these locks' signals, and of no other test's
        self.events: list[Event] = []
        self._attempts: list[Attempt] = []
        self._receivers = [(signal, self._recorder(signal.name)) for signal in _SIGNALS]

    def __enter__(self) -> Self:
        for signal, receiver in self._receivers:
            signal.connect(receiver, sender=self.sender, weak=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for attempt in self._attempts:
            attempt.end()
        for signal, receiver in self._receivers:
            signal.disconnect(receiver, sender=self.sender)
        self.store.close()

    def lock(self, key: str, timeout: float = 2.0, **options: Any) -> Lock:
        """Make a lock of these options."""
        options = {"lock_watchdog_timeout": timeout, **options}
        return Lock([key], [name_of(key)], TaskOptions(**options), self.store, self.watchdog)

    def attempt(self, owner: str | None = None) -> Attempt:
        """Make an attempt, of a new owner unless one is given."""
        number = next(_numbers)
        holder = {"task": "tests.hold", "id": f"id-{number}", "worker": "w", "pid": os.getpid()}
        attempt = Attempt(owner or f"id-{number}@w:{os.getpid()}/{number}", holder, self.sender)
        self._attempts.append(attempt)
        return attempt

    def take(self, key: str, timeout: float = 2.0, **options: Any) -> Lease:
        """Take the lock, which must be free."""
        lease = self.try_take(key, timeout, **options)
        assert isinstance(lease, Lease), lease
        return lease

    def try_take(self, key: str, timeout: float = 2.0, **options: Any) -> Lease | Conflict:
        """Take the lock if it is free."""
        return self.lock(key, timeout, **options).try_acquire(self.attempt())

    def named(self, name: str, lease: Lease | None = None) -> list[Event]:
        """Return the signals of that name, about one lease or about any."""
        return [
            event
            for event in list(self.events)
            if event.name == name and (lease is None or event.lease is lease)
        ]

    def wait_lost(self, lease: Lease) -> Event:
        """Wait until the lease is reported lost."""
        event: Event = wait_for(lambda: self.named("lock_lost", lease), f"loss of {lease!r}")[0]
        return event

    def wait_renewed(self, lease: Lease, times: int = 1) -> None:
        """Wait until the lease has been renewed so often more."""
        wanted = lease.renewals + times
        wait_for(lambda: lease.renewals >= wanted or lease.why_ended, f"renewal of {lease!r}")
        assert lease.renewals >= wanted, lease

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(signal: Any, sender: Any, **arguments: Any) -> None:
            lease = arguments.get("lease")
            held = lease.held if lease is not None else False
            self.events.append(Event(name, lease, arguments, held))

        return record


_SIGNALS = [getattr(signals, name) for name in signals.__all__]


def name_of(key: str) -> str:
    """Name of the lock in Redis."""
    return f"dislock:{{{key}}}"
