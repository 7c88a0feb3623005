"""The list of all locks, read from the lock server once, then searched, sorted and paged here.

The browser gets one page of it.  Each order ends with the key, so that each lock has one place in
it.  A lock becomes JSON here, without what ends a lease or tells arguments, unless that may be
shown.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.checks.troubles import judged
from celery_dislock.operating.locks import as_data, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.operating.locks import ListedLock
    from celery_dislock.operating.site import Site
    from celery_dislock.servers.view import LockState

LOCKS_MOST = 50_000  # that are listed and measured; the others are found by their key
WORDS_MOST = 8  # of a search
HOLDERS_MOST = 200  # of a lock in its own view


class Listing(NamedTuple):
    """
    All locks, as they were when they were read.

    Attributes:
        rows: One for each lock, by key.
        totals: How many locks there are of each kind that the page counts.
        is_cut: Whether there are more locks than are listed.
    """

    rows: Sequence[ListedLock]
    totals: Mapping[str, int]
    is_cut: bool


CHOICES: Mapping[str, Callable[[ListedLock], object]] = {
    "all": lambda _row: True,
    "held": lambda row: row.holders,
    "line": lambda row: row.waiting,
    "limited": lambda row: row.state and row.state.is_limited,
    "reserved": lambda row: row.state and row.state.reservation,
    "overdue": lambda row: "overdue" in row.troubles,
    "paused": lambda row: "paused" in row.troubles,
    "damaged": lambda row: row.problem,
    "trouble": lambda row: row.troubles,
}

TOTALS = ("held", "line", "overdue", "paused", "reserved", "damaged")

ORDERS: Mapping[str, Callable[[ListedLock], Any]] = {
    "key": lambda row: row.key,
    "trouble": lambda row: row.rank,
    "held": lambda row: -row.longest,
    "waiting": lambda row: -row.waiting,
}


def listing(site: Site) -> Listing:
    """
    Read all locks.  Blocks; the lock server answers others in between.

    Args:
        site: Reads them, and knows what is beside them.

    Raises:
        StoreError: A server did not answer.
    """
    read = islice(rows(site.overview), LOCKS_MOST)
    found = sorted(judged(read, site), key=lambda row: (row.key, row.name))
    for row in found:
        if row.problem is not None and not isinstance(row.problem, DamagedLockError):
            raise row.problem
    totals = {kind: sum(map(bool, map(CHOICES[kind], found))) for kind in TOTALS}
    return Listing(found, totals, is_cut=len(found) == LOCKS_MOST)


def find(listed: Sequence[ListedLock], search: str, shown: str, order: str) -> list[ListedLock]:
    """Return the locks that match, in this order; what is equal in it comes by key."""
    words = search.casefold().split()[:WORDS_MOST]
    found = filter(CHOICES[shown], listed)
    if words:
        found = filter(lambda row: all(map(_words(row).__contains__, words)), found)
    return sorted(found, key=ORDERS[order])


def _words(row: ListedLock) -> str:
    """Return what a search looks into, in small letters."""
    words: list[str | None] = [row.key]
    for holder in row.holders:
        words += (holder.who, holder.task, holder.id, holder.worker)
    if row.state and row.state.reservation:
        words.append(row.state.reservation.id)
    return "\n".join(filter(None, words)).casefold()


def as_json(
    state: LockState,
    *,
    show_owners: bool = False,
    show_arguments: bool = False,
    most: int = HOLDERS_MOST,
) -> dict[str, Any]:
    """
    Return a lock as the browser gets it.

    Args:
        state: The lock.
        show_owners: Show what ends a lease or a reservation: for those who may do that.
        show_arguments: Show arguments of tasks.
        most: Maximum number of holders; those who have held it for longest.
    """
    oldest = sorted(state.holders, key=lambda holder: -holder.held)[:most]
    data: dict[str, Any] = as_data(state._replace(holders=oldest))
    data.update(exists=state.exists, held_by=len(state.holders), units=state.units)
    if state.rate is not None and state.rate.rate is not None:
        data["rate"]["words"] = str(state.rate.rate)
    for holder, known in zip(oldest, data["holders"], strict=True):
        known["token"] = str(holder.token)  # a number of JavaScript has 53 bits
        known["can_be_terminated"] = holder.can_be_terminated
    hidden = [] if show_owners else [(holder, "owner") for holder in data["holders"]]
    if data["reservation"] and not show_owners:
        hidden.append((data["reservation"], "mark"))
    if not show_arguments:
        hidden += [(waiter, "args") for waiter in data["line"] + data["turns"]]
    for known, name in hidden:
        known[name] = None
    return data
