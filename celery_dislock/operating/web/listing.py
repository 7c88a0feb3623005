"""The list of all locks, as the lock server was read once: searched, sorted and paged here.

The browser gets one page of it.  The order is one in which each lock has its place, so that turning
a page skips no lock that stays.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.servers.view import TROUBLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import LockState

PAGE = 50  # locks of a page
LOCKS_MOST = 50_000  # locks that are listed; the others are found by their key
WORDS_MOST = 8  # of a search
FOUND_MOST = 50  # searches of one reading whose results are kept


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


SHOWN: Mapping[str, Callable[[Row], object]] = {
    "all": lambda _row: True,
    "held": lambda row: row.state and row.state.holders,
    "line": lambda row: row.state and row.state.waiting,
    "limited": lambda row: row.state and row.state.limit is not None,
    "reserved": lambda row: row.state and row.state.reservation,
    "overdue": lambda row: row.state and row.state.is_overdue,
    "paused": lambda row: row.state and row.state.is_paused,
    "damaged": lambda row: row.problem,
    "trouble": lambda row: row.problem or (row.state and row.state.aside),
}

TOTALS = ("held", "line", "overdue", "paused", "reserved", "damaged")  # counted for the page

ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "key": lambda row: row.key,
    "trouble": lambda row: min(map(TROUBLES.index, _troubles(row)), default=len(TROUBLES)),
    "held": lambda row: (
        -max((one.held for one in row.state.holders), default=0.0) if row.state else 0
    ),
    "waiting": lambda row: -row.state.waiting if row.state else 0,
}


def _troubles(row: Row) -> Sequence[str]:
    return row.state.troubles if row.state else ["damaged"]


class Listing:
    """
    All locks, as they were when they were read.

    Args:
        rows: One for each lock, in any order.
        is_cut: Whether there are more locks than are listed.

    Attributes:
        at: UNIX time of the reading, by the clock of this process.
        is_cut: The argument of that name.
    """

    def __init__(self, rows: Sequence[Row], *, is_cut: bool = False) -> None:
        self._sorted = {"key": sorted(rows, key=lambda row: (row.key, row.name))}
        self._found: dict[tuple[str, ...], list[Row]] = {}
        self.is_cut = is_cut
        self.at = time.time()

    def __len__(self) -> int:
        return len(self._sorted["key"])

    @classmethod
    def read(cls, overview: Overview) -> Listing:
        """
        Read all locks.  Blocks; the lock server answers others in between.

        Raises:
            StoreError: A server did not answer.
        """
        rows: list[Row] = []
        for names in overview.names():
            rows.extend(_rows(names, overview.look(names)))
            if len(rows) >= LOCKS_MOST:
                return cls(rows, is_cut=True)
        return cls(rows)

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """How many locks there are of each kind that the page counts."""
        rows = self._sorted["key"]
        return {kind: sum(map(bool, map(SHOWN[kind], rows))) for kind in TOTALS}

    def find(self, search: str, shown: str, order: str) -> list[Row]:
        """Return the locks that match, in this order; what is equal in it comes by key."""
        words = search.casefold().split()[:WORDS_MOST]
        asked = (order, shown, *words)
        found = self._found.get(asked)
        if found is None:
            # Sorting is stable, so each lock has one place.  Two threads may do it at once.
            rows = self._sorted.get(order)
            if rows is None:
                rows = self._sorted[order] = sorted(self._sorted["key"], key=ORDERS[order])
            found = list(filter(SHOWN[shown], rows)) if shown != "all" else rows
            for word in words:
                found = [row for row in found if word in row.words]
            if len(self._found) >= FOUND_MOST:
                self._found.clear()
            self._found[asked] = found
        return found


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
    told = [state.key]
    for holder in state.holders:
        told += filter(None, (holder.who, holder.task, holder.id, holder.worker))
    if state.reservation is not None:
        told.append(state.reservation.id)
    return "\n".join(map(str, told)).casefold()
