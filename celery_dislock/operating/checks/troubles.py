"""What can be wrong with a lock: the one list, for ``ls``, the page and doctor.

A row of it has a short name, the words of doctor's finding, and what makes it so.  The rows stand
in order: what is worse comes first.  A lock that cannot be read is worse than all of them, and is
named by :attr:`celery_dislock.operating.locks.ListedLock.problem`.

A lock changes while it is looked at.  What lasts for a moment in each healthy fleet is no trouble.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.checks.table import Row, note, number, some, warning
from celery_dislock.servers.view import is_beat
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from celery_dislock.operating.locks import ListedLock
    from celery_dislock.operating.site import Site
    from celery_dislock.servers.view import Holder, LockState

HELD_LONG = 20  # timeouts, while others wait: ten minutes, unless a task has another timeout
STUCK_LONG = 5.0  # seconds since the first in line has come
TURNS_MANY = 3  # turns that a parked task has not claimed: 90 s, unless a task has another timeout
UNMET_LONG = 300.0  # seconds; a worker renews the reservations of what it has every few seconds

REPEAT = "Set it again while all of them answer, or take it back"


class Trouble(NamedTuple):
    """
    A kind of trouble.

    Attributes:
        name: Its name in lists.
        row: What makes it so, and the words of doctor's finding.
        since: Tells for how many seconds it has been so; None: that is not known.
    """

    name: str
    row: Row
    since: Callable[[LockState, Site], float | None] = lambda _lock, _site: None

    def told(self, lock: LockState, site: Site) -> str:
        """Return what is wrong with one lock, and what to do, in sentences."""
        so = self.row.is_so(lock, site)
        more = "" if so is True else f": {so}"
        return f"{self.row.what}{more}. {self.row.remedy.replace('KEY', lock.key)}"


def differing(lock: LockState) -> str:
    """Say that independent servers disagree about the limit of a lock."""
    have = "1 server has" if lock.limit_differs == 1 else f"{lock.limit_differs} servers have"
    most = "no limit" if lock.limit is None else "a pause" if lock.limit == 0 else "a limit"
    return f"most servers have {most}, {have} another state"


def _overdue_for(lock: LockState, _: Site) -> float:
    return max(one.renewed or 0.0 for one in lock.holders)


def _unclaimed(lock: LockState, _: Site) -> str:
    """Name the parked tasks that do not claim their turns: nobody may consume their queues."""
    return some(
        f"ticket {one.ticket}, queue {one.routing_key or '?'}"
        for one in (*lock.turns, *lock.line)
        if one.turns >= TURNS_MANY
    )


def _stuck(lock: LockState, _: Site) -> str | bool:
    """Each release hands the lock on; the first in line may have come a moment ago."""
    if not lock.is_stuck:
        return False
    if not lock.line:
        return True
    first = lock.line[0].waiting
    return f"the first waits for {for_people(first)}" if first > STUCK_LONG else False


def _longest_wait(lock: LockState, _: Site) -> float | None:
    return max((one.waiting for one in (*lock.turns, *lock.line)), default=None)


def _unswept(lock: LockState, site: Site) -> bool:
    homes = {one.broker for one in (*lock.turns, *lock.line) if one.broker}
    return not all(map(site.is_swept, homes))


def _hung(lock: LockState) -> list[Holder]:
    """Return who holds a lock for which others wait, if the body may hang; a beat leads long."""
    return [
        one
        for one in (lock.holders if lock.waiting and not lock.is_too_early else ())
        if one.timeout and one.held > HELD_LONG * one.timeout and not is_beat(one)
    ]


def _held_long(lock: LockState, _: Site) -> str:
    return "; ".join(
        f"for {for_people(one.held)} by {one.who}, with {lock.waiting} waiting"
        for one in _hung(lock)
    )


def _unmet_for(lock: LockState, site: Site) -> tuple[float, str] | None:
    """
    Return for how long no worker has had the message of a reservation, and what its queue tells.

    The sender keeps a reservation for the task's ``lock_unique_for``, from when the message is due,
    and so does each worker that has the message, every few seconds.  So what is over of that time
    is the time since then.  A message that waits in a long queue is not lost.
    """
    one = lock.reservation
    if one is None or one.state != "waiting" or one.since < min(UNMET_LONG, one.remaining):
        return None
    is_half_over = one.since > one.remaining
    # One that was sent with an earlier expiry is kept for less; which it was cannot be told.
    tasks = [
        task
        for task in site.tasks_of(lock.key)
        if task.unique_for <= one.since + one.remaining + 1.0
    ]
    if not tasks or any(task.until == "expiry" for task in tasks):  # no worker renews those
        return (one.since, "") if is_half_over else None
    shortest = min(task.unique_for for task in tasks)
    unmet = shortest - one.remaining
    if unmet < min(UNMET_LONG, shortest / 2):
        return None
    queues = sorted({task.queue for task in tasks})
    messages = site.messages_in(queues)
    if messages == 0:
        return unmet, f"nothing waits in {' and '.join(queues)}"
    return (unmet, "") if is_half_over else None


def _unmet(lock: LockState, site: Site) -> str:
    found = _unmet_for(lock, site)
    return ", ".join(filter(None, (f"for {for_people(found[0])}", found[1]))) if found else ""


def _set_by(does: str, note: str, age: float | None, waiting: int) -> str:
    """Say what somebody has set, why, for how long, and how many wait."""
    so_far = f"for {for_people(age)} so far"
    return "; ".join(filter(None, (does, note, so_far, f"{waiting} waiting" if waiting else "")))


def _paused(lock: LockState) -> str | bool:
    return lock.is_paused and _set_by("paused", lock.limit_note, lock.limit_age, lock.waiting)


def _limited(lock: LockState) -> str:
    told, rate = [], lock.rate
    if lock.limit:
        does = f"to {lock.limit} at a time"
        told.append(_set_by(does, lock.limit_note, lock.limit_age, lock.waiting))
    if rate is not None and rate.is_set:
        told.append(_set_by(f"to {rate.rate}", rate.note, rate.age, lock.waiting))
    return ", and ".join(told)


def _held_back(lock: LockState) -> str:
    if lock.rate is None or not lock.rate.held_back:
        return ""
    lasts = f"for {for_people(lock.rate.held_back)} more"
    return _set_by(lasts, lock.rate.note, lock.rate.age, lock.waiting)


def _limited_for(lock: LockState, _: Site) -> float | None:
    ages = lock.limit_age, lock.rate and lock.rate.is_set and lock.rate.age
    return max(filter(None, ages), default=None)


TAKE_BACK = "To take it back: celery dislock resume KEY"

OVERDUE = Trouble(
    "overdue",
    Row(
        "leases",
        warning,
        lambda lock, _: lock.is_overdue,
        "Leases that missed two renewals, because the process is dead, stopped or cut off",
        "They end by themselves, after their timeout. To end one now: celery dislock free KEY",
    ),
    _overdue_for,
)
TROUBLES: Sequence[Trouble] = (
    OVERDUE,
    Trouble(
        "no worker",
        Row(
            "sweep",
            warning,
            _unswept,
            "Lines of a broker for which no worker sweeps: such a line stands still if the holder "
            "of its lock dies",
            "Start a worker with --dislock on the broker of these tasks. After a worker has ended, "
            "the next one takes over within a third of the timeout: then look again.",
        ),
    ),
    Trouble(
        "unclaimed",
        Row(
            "lines",
            warning,
            _unclaimed,
            f"Parked tasks that had {TURNS_MANY} or more turns, and did not claim them",
            "No worker consumes the queue, or it cannot run them: look at its log. To end one: "
            "celery dislock drop TICKET",
        ),
        _longest_wait,
    ),
    Trouble(
        "stuck",
        Row(
            "lines",
            warning,
            _stuck,
            "Lines of locks that nobody holds",
            "A worker with --dislock goes on with the line at its next sweep, within a third of "
            "the timeout: look again then. To let it go on now: celery dislock resume KEY",
        ),
        _longest_wait,
    ),
    Trouble(
        "hung",
        Row(
            "leases",
            warning,
            _held_long,
            "Held unusually long while others wait",
            "If its body hangs: celery dislock free --terminate KEY. A task that takes that long "
            "on purpose is best given a time limit, and max_renew_times.",
        ),
        lambda lock, _: max(one.held for one in _hung(lock)),
    ),
    Trouble(
        "no leader",
        Row(
            "beats",
            warning,
            lambda lock, _: (
                f"last tick {for_people(lock.ticked or 0.0)} ago" if lock.is_leaderless else ""
            ),
            "No beat leads, so nothing of these schedules is sent",
            "Start beats with --dislock. If some run, their logs say why they stand by. If beats "
            "without --dislock send instead, delete the key :beat of the lock in Redis.",
        ),
        lambda lock, _: lock.ticked,
    ),
    Trouble(
        "unmet",
        Row(
            "reservations",
            warning,
            _unmet,
            "Reserved for a message that no worker has had, so no other message of the key is sent",
            "If it was purged or lost, end the reservation: celery dislock free KEY. It may be in "
            "a queue that its sender has named, come back after the broker's visibility_timeout, "
            "or be with a worker of the pool solo that runs a task. Otherwise the reservation ends "
            "by itself after lock_unique_for.",
        ),
        lambda lock, site: (_unmet_for(lock, site) or (None,))[0],
    ),
    Trouble(
        "set aside",
        Row(
            "set aside",
            warning,
            lambda lock, _: lock.aside and number(lock.aside, "task"),
            "Parked tasks that could not be read or run were set aside",
            "When a worker can run them: celery dislock put-back KEY. See the page Operate it, "
            "Tasks that were set aside.",
        ),
    ),
    Trouble(
        "differs",
        Row(
            "limits",
            warning,
            lambda lock, _: lock.limit_differs and differing(lock),
            "Independent lock servers disagree about a pause or a limit. When another of them is "
            "away, that decides who gets the lock",
            f"{REPEAT}: celery dislock resume KEY",
        ),
    ),
    Trouble(
        "paused",
        Row(
            "limits",
            warning,
            lambda lock, _: lock.waiting and _paused(lock),
            "Paused by somebody while tasks wait",
            TAKE_BACK,
        ),
        lambda lock, _: lock.limit_age,
    ),
    Trouble(
        "limited",
        Row(
            "limits",
            warning,
            lambda lock, _: lock.waiting and _limited(lock),
            "Limited by somebody while tasks wait",
            TAKE_BACK,
        ),
        _limited_for,
    ),
    Trouble(
        "paused",
        Row(
            "limits",
            note,
            lambda lock, _: not lock.waiting and _paused(lock),
            "Paused by somebody",
            TAKE_BACK,
        ),
        lambda lock, _: lock.limit_age,
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
        lambda lock, _: _held_back(lock),
        "Held back by a task or by somebody, so that nobody starts",
        TAKE_BACK,
    ),
)


def troubles_of(lock: LockState, site: Site) -> Iterator[Trouble]:
    """Yield what is wrong with a lock, the worst first."""
    possible = (OVERDUE,) if lock.has_leases_alone else TROUBLES  # thousands have nothing else
    return (one for one in possible if one.row.is_so(lock, site))


def judged(listed: Iterable[ListedLock], site: Site) -> Iterator[ListedLock]:
    """Yield the locks of a list with what is wrong with them."""
    for row in listed:
        if row.state is None:
            what = "damaged" if isinstance(row.problem, DamagedLockError) else "not read"
            yield row._replace(troubles={what: None}, rank=-1)
        elif found := list(troubles_of(row.state, site)):
            since = {one.name: one.since(row.state, site) for one in found}
            yield row._replace(troubles=since, rank=TROUBLES.index(found[0]))
        else:
            yield row
