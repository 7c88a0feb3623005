"""Locks without Celery, as a process has them, and all that they report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock import Conflict, Dislock, Lease, ReentrantLock, signals
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from celery_dislock import StoreError
    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import LockState

PATIENCE = 30.0  # seconds; far beyond what any condition takes on an idle machine
POLL_INTERVAL = 0.005  # seconds


def wait_for(
    condition: Callable[[], Any], what: str = "the condition", within: float = PATIENCE
) -> Any:
    """Wait until *condition* gives something true, and return that."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {within:g} s"
        time.sleep(POLL_INTERVAL)
    return found


def all_locks(
    overview: Overview, failed: list[StoreError] | None = None
) -> list[LockState | StoreError]:
    """Look at all locks, without their lines."""
    return [lock for names in overview.names(failed=failed) for lock in overview.look(names)]


class Event(NamedTuple):
    """A signal that was sent."""

    name: str
    lease: Lease | None
    arguments: Mapping[str, Any]
    held: bool  # whether the lease was, at that moment


class Holding:
    """
    What one process has to hold locks, and the signals that come of it, in their order.

    Args:
        url: The lock server.
        transport: Options of its connections.

    Attributes:
        store: What the locks ask; its connections are others.
    """

    def __init__(self, url: str | list[str], transport: Mapping[str, Any] | None = None) -> None:
        self.dislock = Dislock.from_url(url, transport_options=transport or {})
        self.store = Store(url, transport)
        self.events: list[Event] = []
        self._locks: list[ReentrantLock] = []
        self._leases: list[Lease] = []
        self._receivers = [(signal, self._recorder(signal.name)) for signal in _SIGNALS]

    def __enter__(self) -> Self:
        for signal, receiver in self._receivers:
            signal.connect(receiver, weak=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for lease in self._leases:
            lease.release()
        for signal, receiver in self._receivers:
            signal.disconnect(receiver)
        self.dislock.close()
        self.store.close()

    def lock(self, key: str, timeout: float = 2.0, **options: Any) -> ReentrantLock:
        """Make a lock of these options."""
        self._locks.append(self.dislock.lock(key, watchdog_timeout=timeout, **options))
        return self._locks[-1]

    def take(self, key: str, timeout: float = 2.0, **options: Any) -> Lease:
        """Take the lock, which must be free."""
        lease = self.try_take(key, timeout, **options)
        assert isinstance(lease, Lease), lease
        return lease

    def try_take(self, key: str, timeout: float = 2.0, **options: Any) -> Lease | Conflict:
        """Take the lock if it is free.  Who holds it in this thread has the same lease again."""
        answer = self.lock(key, timeout, **options).try_acquire()
        if isinstance(answer, Lease):
            self._leases.append(answer)
        return answer

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
        wait_for(lambda: lease.renewals >= wanted or not lease.held, f"renewal of {lease!r}")
        assert lease.renewals >= wanted, lease

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(signal: Any, sender: Any, **arguments: Any) -> None:
            if not any(sender is lock for lock in self._locks):
                return
            lease = arguments.get("lease")
            held = lease.held if lease is not None else False
            self.events.append(Event(name, lease, arguments, held))

        return record


_SIGNALS = [getattr(signals, name) for name in signals.__all__]


def name_of(key: str) -> str:
    """Name of the lock in Redis."""
    return f"dislock:{{{key}}}"
