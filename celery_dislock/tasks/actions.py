"""What people do to locks while the workers run: free, drop a parked task, pause and limit."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.app.task import Context

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import ONLY_EXCLUSIVE
from celery_dislock.exceptions import DislockError, SettingsError
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.events import tell_revoked
from celery_dislock.messages.headers import REPLACED
from celery_dislock.messages.message import Message
from celery_dislock.messages.resending import publish
from celery_dislock.parking.store import UNREAD
from celery_dislock.redaction import reason_of
from celery_dislock.servers.overrides import BARRED, rate_of
from celery_dislock.servers.reservations import Reservation
from celery_dislock.servers.view import read_state
from celery_dislock.servers.waiters import parked_message
from celery_dislock.tasks.sending import own_reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

    from celery_dislock.config.terms import Rate
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.view import Holder, ReservationState

NOTE_MOST = 200  # characters
LOOK_EVERY = 0.2  # seconds between two looks at a lease that is about to end
WAIT = 30.0  # seconds for a terminated task to end

# What became of a lease.
FREED, TERMINATED, ENDED_MEANWHILE, STILL_RUNS = (
    "freed",
    "terminated",
    "ended meanwhile",
    "still runs",
)


@dataclass(eq=False, repr=False)
class BrokerError(DislockError):
    """The broker did not take a command for the workers.

    Attributes:
        reason: What went wrong.
    """

    reason: str

    def __str__(self) -> str:
        return f"the broker did not take the command for the workers: {self.reason}"


class Actions:
    """
    Changes locks on behalf of a person.  Each method blocks for its round trips; thread-safe.

    Args:
        app: The app whose tasks take the locks; None: there are no workers.
        process: The store and the lines of this process.
        clock: Monotonic clock, in seconds.
        pause: Called with the seconds to wait.
    """

    def __init__(
        self,
        app: Celery | None,
        process: ParkingProcess,
        *,
        clock: Callable[[], float] = monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._app = app
        self._clock, self._pause = clock, pause
        self._process = process

    def free(self, name: str, owner: str, token: int) -> bool:
        """
        End one lease, and hand the lock to the next in line.

        The holder's body may still run.  Its next renewal finds that the lease is lost.

        Args:
            name: The lock's name in Redis.
            owner: The owner of the lease, as it was shown.
            token: Its fencing token, as it was shown.

        Returns:
            False if that lease has ended meanwhile; nothing was changed.

        Raises:
            StoreError: The server did not answer.  The lease may have ended.
        """
        return self._process.store.free(name, owner, token)

    def end_reservation(self, name: str, shown: ReservationState) -> bool:
        """
        End one reservation, so that the next message of the key is sent.

        The message that it was made for may still wait, and its task may run.

        Args:
            name: The lock's name in Redis.
            shown: The reservation, as it was shown.

        Returns:
            False if that reservation has ended meanwhile; nothing was changed.

        Raises:
            StoreError: The server did not answer.  The reservation may have ended.
        """
        wanted = Reservation.of(name, shown)
        found = read_state(self._process.store.lock_server, name).reservation
        # A key may be reserved again under the same id, which alone would do for the script.
        if found is None or Reservation.of(name, found) != wanted:
            return False
        return self._process.store.reservations.end(wanted)

    def terminate(self, holder: Holder, *, signal: str = "TERM") -> None:
        """
        Tell the workers to end the execution of a task that holds a lock; does not wait for it.

        Its task id is revoked: no worker runs the task under this id any more.

        Args:
            holder: A task's lease.
            signal: The signal that its pool process gets.

        Raises:
            BrokerError: The broker did not take the command.
            SettingsError: There is no app.
        """
        if self._app is None:
            remedy = "there are no workers to be told: make the locks from a Celery app"
            raise SettingsError("free()", "terminate", "True", remedy)
        try:
            self._app.control.revoke(holder.id, terminate=True, signal=signal)
        except Exception as exc:  # noqa: BLE001 -- any of the broker's client
            raise BrokerError(reason_of(exc)) from None

    def terminate_and_free(
        self,
        name: str,
        holder: Holder,
        *,
        wait: float,
        signal: str = "TERM",
        on_sent: Callable[[], None] = lambda: None,
    ) -> str:
        """
        End the task that holds a lock; blocks until its lease has ended, *wait* seconds at most.

        A body that has ended may leave the lease to expire: then it is freed.

        Args:
            name: The lock's name in Redis.
            holder: The lease.  If nobody can terminate what holds it, nobody is told.
            wait: Maximum seconds to wait.
            signal: The signal that its pool process gets.
            on_sent: Called when the broker has taken the command, before the wait.

        Returns:
            TERMINATED: the lease has ended.  STILL_RUNS: its body may still run, and keeps the
            lock.  FREED: the body has ended, and the lease was freed here.
            ENDED_MEANWHILE: the same, but the lease has ended just before it was to be freed.

        Raises:
            BrokerError, SettingsError: As for :meth:`terminate`.
            StoreError: The server did not answer.  The lease may have ended.
        """
        left: Holder | None = holder
        if holder.can_be_terminated:
            self.terminate(holder, signal=signal)
            on_sent()
            left = self._wait_until_ended(name, holder, wait)
        if left is None:
            return TERMINATED
        if left.may_live:
            return STILL_RUNS
        return FREED if self.free(name, holder.owner, holder.token) else ENDED_MEANWHILE

    def _wait_until_ended(self, name: str, holder: Holder, seconds: float) -> Holder | None:
        """Wait until a lease has ended; return it as it is then, if it has not."""
        until = self._clock() + seconds
        while True:
            found = read_state(self._process.store.lock_server, name).holders
            same = [
                holder_now
                for holder_now in found
                if (holder_now.owner, holder_now.token) == (holder.owner, holder.token)
            ]
            if not same or self._clock() >= until:
                return same[0] if same else None
            self._pause(LOOK_EVERY)

    def drop(self, name: str, ticket: str, *, beside: str = "") -> bool:
        """
        End a parked task, with the result REVOKED; no copy of its message runs.

        If its message belongs to another broker, a worker of that broker stores the result at its
        next sweep.

        Args:
            name: The name in Redis of the lock in whose line it was seen.
            ticket: The task's ticket.
            beside: The lock that has its record, if it is another one; see
                :class:`celery_dislock.servers.waiters.Waiter`.

        Returns:
            False if the task is not in line any more: it was dropped, or runs, or has run.

        Raises:
            StoreError: The server did not answer.  The task may be out of the line.
        """
        process = self._process
        if not process.store.lock_server.keeps_lines:
            return False
        first = beside or name  # the lock that has its record
        reason = f"dropped by an operator from the line for lock {key_of(name)!r}"
        dropped = process.lines.drop(first, ticket, json.dumps({REPLACED: reason})[1:-1])
        if dropped is None:
            return False
        with contextlib.suppress(ValueError):  # reported where the task's end is stored
            headers = Message.from_bytes(dropped.message).headers
            own_reservation(self._app, Context(headers)).end()
        if dropped.ours:
            ended = process.publisher.tell_replaced(first, {ticket: dropped.message})
            tell_revoked(self._app, ended)
        return True

    def put_back(self, name: str, ticket: str = "") -> Iterator[tuple[str, str]]:
        """
        Put tasks that were set aside back in line, each at the end.

        A worker that cannot run the task at its turn sets it aside again.  If its ticket cannot be
        read, its message is published without one: it is first published, and then taken out.

        Args:
            name: The lock's name in Redis.
            ticket: The only ticket that is wanted; empty: all.

        Returns:
            Each ticket, and why it was left; empty: it was put back.

        Raises:
            BrokerError: The broker did not take a message.
            StoreError: The server did not answer.
            SettingsError: There is no app, or several independent servers, which park nothing.
        """
        if self._app is None or not self._process.store.lock_server.keeps_lines:
            raise SettingsError(key_of(name), "put-back", name, "nothing was parked here")
        lines = self._process.lines
        seen = set()
        for ticket_id, kept in lines.aside(name, ticket):
            if ticket_id in seen:  # pages may overlap
                continue
            seen.add(ticket_id)
            written, broker = parked_message(kept)
            if broker is not None and broker != self._process.store.broker:
                yield ticket_id, "its message belongs to another broker"
                continue
            try:
                message = Message.from_bytes(written)
            except ValueError as exc:
                yield ticket_id, f"its message is lost: {exc}"
                continue
            self._process.publisher.waits_again(name, ticket_id)
            problem = lines.put_back(name, ticket_id)
            if problem == UNREAD:
                try:
                    publish(self._app, message, {})
                except Exception as exc:  # noqa: BLE001 -- any of the broker's client
                    raise BrokerError(reason_of(exc)) from None
                lines.forget_aside(name, ticket_id)
                problem = ""
            yield ticket_id, problem

    def limit(
        self, name: str, limit: int | None, *, seconds: float | None = None, note: str = ""
    ) -> int | None:
        """
        Admit another number of leases than the code says; 0 pauses the lock.

        A pause for some time is a hold-back: in line it is known when it ends.

        Those who hold it keep it.  Those who wait and are parked stay in line, and are served when
        the limit admits them.

        Args:
            name: The lock's name in Redis.
            limit: The number of exclusive leases, >= 0.  None: the code's limit holds again.
            seconds: How long this lasts, > 0; None: until it is taken back.
            note: Why, and by whom: shown to people, and to tasks that are refused.

        Returns:
            The limit that was set until now; None if there was none.

        Raises:
            SettingsError: Several independent servers admit one lease at most.
            StoreError: The server did not answer.  The limit may have been set.
        """
        if (limit or 0) > 1:
            self._refuse_several(name, "limit", limit)
        what: dict[str, Any] = {"limit": limit}
        if limit == 0 and seconds is not None and self._process.store.lock_server.keeps_lines:
            what = {"pause": BARRED}  # its end is known in line; a limit that is set holds after it
        before = self._process.store.override(name, seconds or 0.0, one_line(note), **what)
        return int(before["limit"].value) if "limit" in before and "limit" in what else None

    def rate(
        self, name: str, rate: Rate | None, *, seconds: float | None = None, note: str = ""
    ) -> Rate | None:
        """
        Let a lock be taken more or less often than the code says.

        Args:
            name: The lock's name in Redis.
            rate: The rate.  None: what the code says holds again, and it is not held back.
            seconds: How long this lasts, > 0; None: until it is taken back.
            note: As for :meth:`limit`.

        Returns:
            The rate that was set until now; None if there was none.

        Raises:
            SettingsError: Several independent servers count no starts.
            StoreError: The server did not answer.  The rate may have been set.
        """
        self._refuse_several(name, "rate", rate)
        what = dict.fromkeys(("rate", "pause", "back")) if rate is None else {"rate": rate.word}
        before = self._process.store.override(name, seconds or 0.0, one_line(note), **what)
        return rate_of(before["rate"].value) if "rate" in before else None

    def hold_back(self, name: str, seconds: float, *, note: str = "") -> None:
        """
        Let nobody start for some time.

        Args:
            name: The lock's name in Redis.
            seconds: For how long, >= 0; it replaces an earlier time, but not that of an operator's
                pause.  0: they may start at once.
            note: As for :meth:`limit`.

        Raises:
            SettingsError, StoreError: As for :meth:`rate`.
        """
        self._refuse_several(name, "hold_back", seconds)
        back = BARRED if seconds else None
        self._process.store.override(name, seconds, one_line(note), back=back)

    def _refuse_several(self, name: str, what: str, value: object) -> None:
        if not self._process.store.lock_server.keeps_lines:
            raise SettingsError(key_of(name), what, value, ONLY_EXCLUSIVE)


def one_line(note: str) -> str:
    """Return a note as it is stored: one line, of limited length."""
    return " ".join(note.split())[:NOTE_MOST]
