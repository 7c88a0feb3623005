"""The result that a caller gets if its message was not sent: that of the message already there.

``get()`` waits for the task of that message as for any other, and asks the lock server now and then
whether a result can still come.  If the key's reservation, the lock and the result all do not say
that the task waits or runs, ``get()`` raises :class:`NoResultError` instead of waiting for ever.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError

from celery_dislock.exceptions import NoResultError, StoreError
from celery_dislock.keys.names import shown_id, task_id_of_reserved
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.lease import current
from celery_dislock.parking.answers import PARKED
from celery_dislock.servers.view import read_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Generic, TypeVar

    from celery.result import AsyncResult

    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.tasks.guard import Guard

    R_co = TypeVar("R_co", covariant=True)

    class Sent(AsyncResult, Generic[R_co]):  # type: ignore[misc]
        """What ``delay()`` returns: Celery's AsyncResult."""

        id: str
        duplicate: bool  # whether it is the result of a message that was there already

        def get(
            self,
            timeout: float | None = None,
            propagate: bool = True,  # noqa: FBT001, FBT002 -- as in Celery
            interval: float = 0.5,
            **options: Any,
        ) -> R_co:
            """Wait for the result, as Celery's does."""


LOOK_EVERY = 2.0  # seconds between two looks at the lock server, while a caller waits
ITSELF = "it is the task that asks, which would wait for itself"  # why there is no result
STORED_WITHIN = 10.0  # seconds in which a task's result is stored after its lock was released


@dataclass(frozen=True)
class FirstMessage:
    """
    The message that was sent first, as far as the sender of a duplicate knows it.

    Attributes:
        guard: The guard of its task.
        locks: Names of the task's locks in Redis.
        reserved: Its reservation.  Mark and number are missing: only its own sender knows them.
        has_result: Whether the result of its task is stored.
    """

    guard: Guard
    locks: Sequence[str]
    reserved: Reservation
    has_result: bool

    @property
    def id(self) -> str:
        """Id of its task."""
        return task_id_of_reserved(self.reserved.id)

    @property
    def key(self) -> str:
        """The key, or all keys in one text, for messages."""
        return " + ".join(map(key_of, self.locks))

    def silent_for(self) -> float:
        """
        Ask the lock server since when the task has ended; blocks for a round trip or two.

        Returns:
            Seconds since the task has ended; 0 if it waits or runs; infinity if that is not known.

        Raises:
            StoreError: The lock server did not answer.
        """
        server = self.guard.runtime.process.quick_store.lock_server
        state = read_state(server, self.reserved.lock)
        record, holders = state.reservation, state.holders
        if self.reserved.lock != self.locks[0]:
            holders = read_state(server, self.locks[0]).holders
        if self.id in {holder.id for holder in holders}:
            return 0.0
        if record is None or record.id != self.id:
            return math.inf
        if record.state == "ended":
            return record.since
        # A dead worker does not renew its task's reservation, which ends soon.  With "expiry" the
        # reservation stays, but the task does not hold its lock.
        is_dead = record.state == "running" and self.reserved.until == "expiry" and self._holds()
        return math.inf if is_dead else 0.0

    def patience(self, state: str) -> float:
        """Return after how many seconds without a sign of the task no result is expected."""
        # With "end" the reservation lasts as long as the task, unless the task is parked.
        is_unseen = state == PARKED or (
            self.reserved.until != "end" and (state == states.RETRY or not self._holds())
        )
        unique_for = self.guard.options.lock_unique_for  # seconds that its message may wait
        return max(STORED_WITHIN, unique_for) if is_unseen else STORED_WITHIN

    def _holds(self) -> bool:
        """Tell whether the task holds its lock for as long as it runs."""
        return self.guard.interval is not None


class DuplicateResult:
    """A part of the class of a duplicate's result, before a class of Celery's results."""

    duplicate = True
    first: FirstMessage

    def get(self: Any, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        """
        Wait for the result of the task whose message is there, as ``AsyncResult.get()`` does.

        Raises:
            NoResultError: No result is expected any more; the error says why.
        """
        if not (self.ignored or self.first.has_result or self.ready()):
            raise NoResultError(self.first.key, self.id, "its sender has asked for none")
        running = current.get()
        if running is not None and running.holder.get("id") == shown_id(self.id):
            raise NoResultError(self.first.key, self.id, ITSELF)
        until = time.monotonic() + timeout if timeout else math.inf
        silent_since, unique_for = math.inf, self.first.guard.options.lock_unique_for
        while True:
            left = min(LOOK_EVERY, max(until - time.monotonic(), 0.001))
            try:
                return super().get(left, *args, **options)  # type: ignore[misc]
            except CeleryTimeoutError:
                if self.ready():  # the result came just now, or the task itself raised this error
                    return super().get(LOOK_EVERY, *args, **options)  # type: ignore[misc]
                if time.monotonic() >= until:
                    raise
            try:
                silent, patience = self.first.silent_for(), self.first.patience(self.state)
                reason = self._why_none(silent)
            except StoreError as exc:
                silent, patience, reason = math.inf, unique_for, str(exc)
            silent_since = min(silent_since, time.monotonic()) if silent else math.inf
            known = silent if math.isfinite(silent) else time.monotonic() - silent_since
            if silent and known >= patience:
                raise NoResultError(self.first.key, self.id, reason)

    wait = get  # as in Celery

    def __reduce__(self) -> Any:
        """Pickle it as a result of the plain class, which has a name that can be imported."""
        reduced: Any = super().__reduce__()
        made_by, arguments = reduced
        return type(self).__mro__[2] if made_by is type(self) else made_by, arguments

    def __copy__(self) -> Any:
        """Copy it with *first*, which Celery's copy leaves out."""
        again: Any = super().__copy__()  # type: ignore[misc]
        again.first = self.first
        return again

    @staticmethod
    def _why_none(silent: float) -> str:
        if math.isfinite(silent):
            return f"its task has ended {silent:.0f} s ago, and its result is not stored any more"
        return (
            "its key is not reserved for it any more, it does not hold its lock, and its result is "
            "not stored: its worker was killed, its message was lost or purged, its result has "
            "expired or was not kept"
        )


@cache
def _class_of(result_cls: Any) -> Any:
    return type(result_cls.__name__, (DuplicateResult, result_cls), {})


def duplicate_of(result_cls: Any, first: FirstMessage) -> Any:
    """
    Return the result of the message that is there.

    Args:
        result_cls: The class of the app's results, or a callable that makes one from the id.
        first: The message.
    """
    result = result_cls(first.id)
    plain: Any = type(result)
    result.__class__ = _class_of(plain)
    result.first = first
    return result
