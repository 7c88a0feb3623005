"""The list of all locks, read from the lock server once, then searched, sorted and paged here.

The browser gets one page of it.  Each order ends with the key, so that each lock has one place in
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.servers.view import TROUBLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import LockState

LOCKS_MOST = 50_000  # locks that are listed; the others are found by their key
WORDS_MOST = 8  # of a search


class Row(NamedTuple):
    """
    A lock of the list.

    Attributes:
        key: The key.
        name: The lock's name in Redis.
        words: What a search looks into, in small letters.
        state: What the lock server knows of it; None if it cannot be read.
        problem: Why it cannot be read.
    """

    key: str
    name: str
    words: str
    state: LockState | None
    problem: str | None

    @property
    def troubles(self) -> Sequence[str]:
        """What keeps tasks from running: some of :data:`TROUBLES`, in that order."""
        return self.state.troubles if self.state else TROUBLES[:1]


class Listing(NamedTuple):
    """
    All locks, as they were when they were read.

    Attributes:
        rows: One for each lock, by key.
        totals: How many locks there are of each kind that the page counts.
        is_cut: Whether there are more locks than are listed.
    """

    rows: Sequence[Row]
    totals: Mapping[str, int]
    is_cut: bool


SHOWN: Mapping[str, Callable[[Row], object]] = {
    "all": lambda _row: True,
    "held": lambda row: row.state and row.state.holders,
    "line": lambda row: row.state and row.state.waiting,
    "limited": lambda row: row.state and row.state.limit is not None,
    "reserved": lambda row: row.state and row.state.reservation,
    "overdue": lambda row: "overdue" in row.troubles,
    "paused": lambda row: "paused" in row.troubles,
    "damaged": lambda row: row.problem,
    "trouble": lambda row: row.problem or (row.state and row.state.aside),
}

COUNTED = ("held", "line", "overdue", "paused", "reserved", "damaged")

ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "key": lambda row: row.key,
    "trouble": lambda row: min(map(TROUBLES.index, row.troubles), default=len(TROUBLES)),
    "held": lambda row: (
        -max((one.held for one in row.state.holders), default=0.0) if row.state else 0.0
    ),
    "waiting": lambda row: -row.state.waiting if row.state else 0,
}


def listing(overview: Overview) -> Listing:
    """
    Read all locks.  Blocks; the lock server answers others in between.

    Raises:
        StoreError: A server did not answer.
    """
    rows: list[Row] = []
    for names in overview.names():
        rows.extend(_rows(names, overview.look(names)))
        if len(rows) >= LOCKS_MOST:
            break
    rows.sort()  # by key, then by name
    totals = {kind: sum(map(bool, map(SHOWN[kind], rows))) for kind in COUNTED}
    return Listing(rows, totals, is_cut=len(rows) >= LOCKS_MOST)


def find(rows: Sequence[Row], search: str, shown: str, order: str) -> list[Row]:
    """Return the locks that match, in this order; what is equal in it comes by key."""
    words = search.casefold().split()[:WORDS_MOST]
    found = [row for row in filter(SHOWN[shown], rows) if all(word in row.words for word in words)]
    return found if order == "key" else sorted(found, key=ORDERS[order])


def _rows(names: Sequence[str], states: Sequence[LockState | StoreError]) -> Iterator[Row]:
    for name, state in zip(names, states, strict=True):
        if isinstance(state, DamagedLockError):
            key = key_of(name)
            yield Row(key, name, key.casefold(), None, str(state))
        elif isinstance(state, StoreError):
            raise state
        elif state.exists:
            yield Row(state.key, name, _words(state), state, None)


def _words(state: LockState) -> str:
    words = [state.key]
    for holder in state.holders:
        words += filter(None, (holder.who, holder.task, holder.id, holder.worker))
    if state.reservation is not None:
        words.append(state.reservation.id)
    return "\n".join(words).casefold()
