"""The metrics: what each is called, what it says, and where it comes from.

A row of :data:`METRICS` is all that a metric needs, beside the line of
:mod:`celery_dislock.operating.telemetry` that counts it.
Counters and histograms are counted by the processes; see
:mod:`celery_dislock.operating.counting`.  Gauges are read from the locks when somebody asks; see
:mod:`celery_dislock.operating.web.metrics`.  OpenTelemetry has instruments for all that is counted.
"""

from __future__ import annotations

from collections import Counter
from operator import add, attrgetter
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.servers.view import is_beat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from celery_dislock.servers.view import Holder, LockState, ReservationState

    Labels = tuple[str, ...]
    # Given a lock, what it adds to a gauge, by labels.
    Source = Callable[[LockState], Iterable[tuple[tuple[str | None, ...], float]]]

PREFIX = "celery_dislock_"
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)  # seconds
SUM = "sum"
MICROSECONDS = 1e6  # in which sums are counted: whole numbers add up exactly
PARTS = (*(f"{limit:g}" for limit in BUCKETS), "inf", SUM)  # of a histogram

TASK, WORKER, OUTCOME, STATE, TROUBLE = "task", "worker", "outcome", "state", "trouble"
BY_WORKER, BY_OUTCOME = (TASK, WORKER), (TASK, WORKER, OUTCOME)


class Metric(NamedTuple):
    """
    A metric that is exported.

    Attributes:
        kind: "counter", "histogram" or "gauge".
        name: Its name, with the ending of a counter.
        labels: Names of its labels.
        meaning: What it says, in a sentence.
        of: What a lock adds to a gauge; None: it is counted, or said by who reads the metrics.
        together: Makes one number of those of several locks.
    """

    kind: str
    name: str
    labels: tuple[str, ...]
    meaning: str
    of: Source | None = None
    together: Callable[[float, float], float] = add

    @property
    def word(self) -> str:
        """How processes count it, and OpenTelemetry calls it: the name without its ends."""
        return self.name.removeprefix(PREFIX).removesuffix("_total").removesuffix("_seconds")


def _one(_of: object) -> float:
    return 1.0


def _holders(number: Callable[[Holder], float]) -> Source:
    return lambda lock: (((holder.task, holder.worker), number(holder)) for holder in lock.holders)


def _parked(lock: LockState) -> Iterable[tuple[tuple[str | None], float]]:
    """Count the parked tasks that were read; those beyond them count for the most frequent task."""
    found = Counter((waiter.task,) for waiter in lock.line if waiter.parked)
    for task, _ in found.most_common(1):
        found[task] += lock.waiting - len(lock.line)
    return found.items()


def _oldest(lock: LockState) -> Iterable[tuple[tuple[str | None], float]]:
    return [((waiter.task,), waiter.parked_for or 0.0) for waiter in lock.line if waiter.parked][:1]


def _reserved(number: Callable[[ReservationState], float]) -> Source:
    def of(lock: LockState) -> Iterable[tuple[tuple[str], float]]:
        reservation = lock.reservation
        return [((reservation.state,), number(reservation))] if reservation is not None else []

    return of


def _beats(lock: LockState) -> Iterable[tuple[tuple[str], float]]:
    if lock.ticked is None:
        return []
    leading = sum(map(is_beat, lock.holders))
    known = {"leading": leading, "standing by": lock.waiting, "missing": lock.is_leaderless}
    return [((state,), number) for state, number in known.items()]


def _kind(kind: str) -> Callable[..., Metric]:
    return lambda word, *about: Metric(kind, PREFIX + word, *about)


_counter, _histogram, _gauge = map(_kind, ("counter", "histogram", "gauge"))

IN_TROUBLE = _gauge(
    "troubles", (TROUBLE,), "Locks that are in trouble now, by what celery dislock ls calls it."
)
IN_TROUBLE_FOR = _gauge(
    "troubles_oldest_seconds",
    (TROUBLE,),
    "Seconds for which the first of them has been so, of those of which that is known.",
    None,
    max,
)

METRICS = (
    _counter(
        "messages_total",
        BY_OUTCOME,
        "Messages of unique tasks: sent, duplicate (not sent), unreserved (sent, its key was not "
        "reserved), or replaced (told by the worker that got it).",
    ),
    _counter(
        "acquisitions_total",
        BY_OUTCOME,
        "Leases that were granted: at_once, waited (in a worker slot), parked (its turn came), or "
        "put_off (it was sent again before).",
    ),
    _counter(
        "conflicts_total",
        BY_OUTCOME,
        "Deliveries that found their lock held, by what lock_on_conflict made of them; copy: "
        "another delivery of the same task held it; refused: in plain Python.",
    ),
    _counter(
        "early_total",
        BY_WORKER,
        "Conflicts in which only the time was in the way: too early for the rate, or held back.",
    ),
    _counter(
        "lost_total",
        BY_OUTCOME,
        "Leases that were lost while their bodies ran: expired (not renewed in time), or gone.",
    ),
    _counter("capped_total", BY_WORKER, "Leases that have had max_renew_times renewals."),
    _counter("renewals_total", BY_WORKER, "Renewals of leases by the watchdogs."),
    _counter(
        "unavailable_total",
        BY_OUTCOME,
        "Deliveries to which the lock server did not answer, by dislock_on_unavailable.",
    ),
    _histogram(
        "wait_seconds", BY_WORKER, "Seconds from the first request for a lock to its grant."
    ),
    _histogram(
        "held_seconds", BY_WORKER, "Seconds from the grant of a lock to its release or loss."
    ),
    _gauge("leases", BY_WORKER, "Leases that are live now.", _holders(_one)),
    _gauge(
        "leases_overdue",
        BY_WORKER,
        "Live leases of which two renewals in a row were missed.",
        _holders(attrgetter("is_overdue")),
    ),
    _gauge("parked", (TASK,), "Parked tasks that are in line now.", _parked),
    _gauge(
        "parked_oldest_seconds",
        (TASK,),
        "Seconds for which the oldest of them has been parked, of lines that begin with the task.",
        _oldest,
        max,
    ),
    _gauge(
        "reservations",
        (STATE,),
        "Keys reserved now: being sent, waiting, running or ended.",
        _reserved(_one),
    ),
    _gauge(
        "reservations_oldest_seconds",
        (STATE,),
        "Seconds since the oldest of these was made; with ended, since its task has ended.",
        _reserved(attrgetter("since")),
        max,
    ),
    IN_TROUBLE,
    IN_TROUBLE_FOR,
    _gauge(
        "beats",
        (STATE,),
        "Beats that are leading or standing by now; missing: keys of beats that no beat leads by.",
        _beats,
    ),
    _gauge(
        "locks_cut", (), "1 if the gauges are of 50,000 locks, and there are more; else left out."
    ),
    _gauge("server_up", (), "1 if the lock server answered all that was asked; else 0."),
)
COUNTED = {metric.word: metric for metric in METRICS if metric.kind != "gauge"}
