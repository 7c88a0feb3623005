"""What can be wrong with a lock: the one list, and the one function, for all that tell of it.

``ls``, ``show``, the page and doctor ask :func:`troubles_of`.  A row has a short name, the words of
doctor's finding, and what makes it so.  What is worse comes first.

A lock changes while it is looked at.  What lasts for a moment in each healthy fleet is no trouble.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.checks.table import Row, note, number, serious, warning
from celery_dislock.servers.view import is_beat
from celery_dislock.words import filled, for_people, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery_dislock.operating.locks import ListedLock
    from celery_dislock.operating.site import Site, UniqueTask
    from celery_dislock.servers.view import LockState, ReservationState
    from celery_dislock.servers.waiters import Waiter

HELD_LONG = 20  # timeouts, while others wait: ten minutes, unless a task has another timeout
STUCK_LONG = 5.0  # seconds since the first in line has come
TURNS_MANY = 3  # turns that a parked task has not claimed: 90 s, unless a task has another timeout
UNMET_LONG = 300.0  # seconds; a worker renews the reservations of what it has every few seconds


class Sign(NamedTuple):
    """
    That something is wrong with a lock.

    Attributes:
        more: More of it, in words; may be empty.
        since: Seconds for which it has been so; None: that is not known.
    """

    more: str = ""
    since: float | None = None


class Trouble(NamedTuple):
    """
    Something that is wrong with one lock.

    Attributes:
        row: What is wrong.
        more, since: As in :class:`Sign`.
    """

    row: Row
    more: str = ""
    since: float | None = None

    @property
    def name(self) -> str:
        """Its name in lists."""
        return self.row.name

    def told(self, lock: LockState) -> str:
        """Return what is wrong with this lock, and what to do, in sentences."""
        more = f": {self.more}" if self.more else ""
        return f"{self.row.what}{more}. {filled(self.row.remedy, KEY=lock.argument)}"


def _overdue(lock: LockState, _: Site) -> Sign | None:
    """A holder missed two renewals in a row: its process is dead, stopped or cut off."""
    late = [holder.renewed or 0.0 for holder in lock.holders if holder.is_overdue]
    return Sign(since=max(late)) if late else None


def _unswept(lock: LockState, site: Site) -> Sign | None:
    """Parked tasks wait, and no worker sweeps the lines of their broker."""
    brokers = {waiter.broker for waiter in (*lock.turns, *lock.line) if waiter.broker}
    return None if all(map(site.is_swept, brokers)) else Sign()


def unclaimed(lock: LockState) -> list[Waiter]:
    """Return the parked tasks that had three turns, and claimed none."""
    return [waiter for waiter in (*lock.turns, *lock.line) if waiter.turns >= TURNS_MANY]


def _unclaimed(lock: LockState, _: Site) -> Sign | None:
    """A parked task had three turns, and claimed none."""
    found = [
        f"ticket {waiter.ticket}, queue {waiter.routing_key or '?'}" for waiter in unclaimed(lock)
    ]
    return Sign(some(found), _longest_wait(lock)) if found else None


def _stuck(lock: LockState, _: Site) -> Sign | None:
    """
    Others wait for more than five seconds, nobody holds it, and its rate admits a start.

    Each release hands the lock on; the first in line may have come a moment ago.
    """
    first = lock.line[0].waiting if lock.line else None
    if not lock.is_stuck or (first is not None and first <= STUCK_LONG):
        return None
    more = "" if first is None else f"the first waits for {for_people(first)}"
    return Sign(more, _longest_wait(lock))


def _longest_wait(lock: LockState) -> float | None:
    return max((waiter.waiting for waiter in (*lock.turns, *lock.line)), default=None)


def _hung(lock: LockState, _: Site) -> Sign | None:
    """Held for more than twenty of its timeouts, ten minutes by default, while others wait."""
    hung = [
        holder
        for holder in (lock.holders if lock.waiting and not lock.is_too_early else ())
        if holder.timeout and holder.held > HELD_LONG * holder.timeout and not is_beat(holder)
    ]
    told = (
        f"for {for_people(holder.held)} by {holder.who}, with {lock.waiting} waiting"
        for holder in hung
    )
    return Sign("; ".join(told), max(holder.held for holder in hung)) if hung else None


def _leaderless(lock: LockState, _: Site) -> Sign | None:
    """No beat leads by this key, by which beats have led within thirty days."""
    if lock.ticked is None or not lock.is_leaderless:
        return None
    return Sign(f"last tick {for_people(lock.ticked)} ago", lock.ticked)


def unmet(record: ReservationState, tasks: Iterable[UniqueTask]) -> tuple[float, list[UniqueTask]]:
    """
    Return the seconds for which no worker has had a message since it was due; < 0: it is due later.

    Who sends a message, and a worker that has it, keeps the reservation for ``lock_unique_for``,
    from when it is due.  Also returns those of the *tasks* whose message it may be; the shortest of
    their times counts.
    """
    kept = record.since + record.remaining
    # One that was sent with an earlier expiry is kept for less; which it was cannot be told.
    senders = [task for task in tasks if task.options.lock_unique_for <= kept + 1.0]
    least = min((task.options.lock_unique_for for task in senders), default=kept)
    return least - record.remaining, senders


def _unmet(lock: LockState, site: Site) -> Sign | None:
    """
    Its key is reserved, no worker has had the message for five minutes, and its queue is empty.

    A message that waits in a long queue is not lost; a parked task's is on the lock server.
    """
    if (record := lock.reservation) is None or record.state != "waiting":
        return None
    since, tasks = unmet(record, of_key := site.tasks_of(lock.key))
    are_unseen = lock.waiting > len(lock.line)  # in line; it may be one of those
    if lock.are_several:  # that does not say in which line their task would stand
        are_unseen = not of_key or any(task.options.parks for task in of_key)
    is_parked = any(waiter.id == record.id for waiter in (*lock.turns, *lock.line))
    if since < min(UNMET_LONG, record.remaining) or are_unseen or is_parked:
        return None
    queues, told = sorted({task.queue for task in tasks}), f"for {for_people(since)}"
    no_worker_renews = not tasks or any(
        task.options.lock_unique_until == "expiry" for task in tasks
    )
    if not no_worker_renews and site.messages_in(queues) == 0:
        return Sign(f"{told}, nothing waits in {' and '.join(queues)}", since)
    return Sign(told, since) if since > record.remaining else None


def _aside(lock: LockState, _: Site) -> Sign | None:
    """Parked tasks that nobody could read or run were set aside."""
    return Sign(number(lock.aside, "task")) if lock.aside else None


def _differing(lock: LockState, _: Site) -> Sign | None:
    """Several lock servers disagree about a pause or a limit."""
    if not lock.limit_differs:
        return None
    have = "1 server has" if lock.limit_differs == 1 else f"{lock.limit_differs} servers have"
    most = "no limit" if lock.limit is None else "a pause" if lock.limit == 0 else "a limit"
    return Sign(f"most servers have {most}, {have} another state")


def _set_by(does: str, note: str, age: float | None, waiting: int) -> str:
    """Say what somebody has set, why, for how long, and how many wait."""
    so_far = f"for {for_people(age)} so far"
    return "; ".join(filter(None, (does, note, so_far, f"{waiting} waiting" if waiting else "")))


def _paused(lock: LockState) -> Sign | None:
    if not lock.is_paused:
        return None
    more = _set_by("paused", lock.limit_note, lock.limit_age, lock.waiting)
    return Sign(more, lock.limit_age)


def _limited(lock: LockState) -> Sign | None:
    told, rate = {}, lock.rate
    if lock.limit:
        does = f"to {lock.limit} at a time"
        told[_set_by(does, lock.limit_note, lock.limit_age, lock.waiting)] = lock.limit_age
    if rate is not None and rate.is_set:
        told[_set_by(f"to {rate.rate}", rate.note, rate.age, lock.waiting)] = rate.age
    since = max(filter(None, told.values()), default=None)
    return Sign(", and ".join(told), since) if told else None


def _held_back(lock: LockState, _: Site) -> Sign | None:
    if lock.rate is None or not lock.rate.held_back:
        return None
    lasts = f"for {for_people(lock.rate.held_back)} more"
    return Sign(_set_by(lasts, lock.rate.back_note, lock.rate.age, lock.waiting))


TAKE_BACK = "To take it back: celery dislock resume KEY"

DAMAGED = Row(
    "locks",
    serious,
    lambda _lock, _site: None,  # it cannot be looked at: see troubles_of()
    "Locks that cannot be used, so that their tasks fail",
    "See the page Operate it, A damaged lock.",
    "damaged",
)
NOT_READ = Row(
    "locks",
    note,
    lambda _lock, _site: None,
    "Locks that could not be looked at",
    "",
    "not read",
)
OVERDUE = Row(
    "leases",
    warning,
    _overdue,
    "Leases that missed two renewals, because the process is dead, stopped or cut off",
    "They end by themselves, after their timeout. A body that is stopped or cut off may go on: to "
    "end it first, celery dislock free --terminate KEY",
    "overdue",
)
TROUBLES = (
    DAMAGED,
    NOT_READ,
    OVERDUE,
    Row(
        "sweep",
        warning,
        _unswept,
        "Lines of a broker for which no worker sweeps: such a line stands still if the holder of "
        "its lock dies",
        "Start a worker with --dislock on the broker of these tasks. After a worker has ended, the "
        "next one takes over within a third of the timeout: then look again.",
        "no worker",
    ),
    Row(
        "lines",
        warning,
        _unclaimed,
        f"Parked tasks that had {TURNS_MANY} or more turns, and did not claim them",
        "No worker consumes the queue, or it cannot run them: look at its log. To end one: "
        "celery dislock drop TICKET",
        "unclaimed",
    ),
    Row(
        "lines",
        warning,
        _stuck,
        "Lines of locks that nobody holds",
        "A worker with --dislock goes on with the line at its next sweep, within a third of the "
        "timeout: look again then. To let it go on now: celery dislock resume KEY",
        "stuck",
    ),
    Row(
        "leases",
        warning,
        _hung,
        "Held unusually long while others wait",
        "If its body hangs: celery dislock free --terminate KEY. A task that takes that long on "
        "purpose is best given a time limit, and max_renew_times.",
        "hung",
    ),
    Row(
        "beats",
        warning,
        _leaderless,
        "No beat leads, so nothing of these schedules is sent",
        "Start beats with --dislock. If some run, their logs say why they stand by. If beats "
        "without --dislock send instead, delete the key :beat of the lock in Redis.",
        "no leader",
    ),
    Row(
        "reservations",
        warning,
        _unmet,
        "Reserved for a message that no worker has had, so no other message of the key is sent",
        "If it was purged or lost, end the reservation: celery dislock free --reservation KEY. It "
        "may be in a queue that its sender has named, come back after the broker's "
        "visibility_timeout, or be with a worker of the pool solo that runs a task. Otherwise the "
        "reservation ends by itself after lock_unique_for.",
        "unmet",
    ),
    Row(
        "set aside",
        warning,
        _aside,
        "Parked tasks that could not be read or run were set aside",
        "When a worker can run them: celery dislock put-back KEY. See the page Operate it, Tasks "
        "that were set aside.",
        "set aside",
    ),
    Row(
        "limits",
        warning,
        _differing,
        "Independent lock servers disagree about a pause or a limit. When another of them is away, "
        "that decides who gets the lock",
        "Set it again while all of them answer, or take it back: celery dislock resume KEY",
        "differs",
    ),
    Row(
        "limits",
        warning,
        lambda lock, _: lock.waiting and _paused(lock),
        "Paused by somebody while tasks wait",
        TAKE_BACK,
        "paused",
    ),
    Row(
        "limits",
        warning,
        lambda lock, _: lock.waiting and _limited(lock),
        "Limited by somebody while tasks wait",
        TAKE_BACK,
        "limited",
    ),
    Row(
        "limits",
        note,
        lambda lock, _: not lock.waiting and _paused(lock),
        "Paused by somebody",
        TAKE_BACK,
        "paused",
    ),
)

# What somebody has set is no trouble while nobody waits, or ends soon: doctor mentions it.
MENTIONED = (
    Row(
        "limits",
        note,
        lambda lock, _: not lock.waiting and _limited(lock),
        "Limited by somebody",
        TAKE_BACK,
    ),
    Row(
        "limits",
        note,
        _held_back,
        "Held back by a task or by somebody, so that nobody starts",
        TAKE_BACK,
    ),
)


def troubles_of(
    found: LockState | StoreError, site: Site, rows: Sequence[Row] = TROUBLES
) -> list[Trouble]:
    """
    Return what is wrong with a lock, the worst first.

    Args:
        found: What the lock server knows of it, or why that cannot be read.
        site: What is known beside it.
        rows: What to look for.
    """
    if isinstance(found, StoreError):
        row = DAMAGED if isinstance(found, DamagedLockError) else NOT_READ
        return [Trouble(row, found.reason)]
    if found.has_leases_alone:  # thousands have nothing else
        rows = (OVERDUE,)
    return [Trouble(row, *sign) for row in rows if (sign := row.is_so(found, site))]


def judged(listed: Iterable[ListedLock], site: Site) -> Iterator[ListedLock]:
    """Yield the locks of a list with what is wrong with them."""
    for row in listed:
        if found := troubles_of(row.found, site):
            since = {finding.name: finding.since for finding in found}
            yield row._replace(troubles=since, rank=TROUBLES.index(found[0].row))
        else:
            yield row
