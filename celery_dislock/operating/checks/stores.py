"""Look for tasks that were parked on another lock server, or under another prefix.

They were left there when ``dislock_url`` or ``dislock_prefix`` was changed.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.findings import WARNING, Finding, listed, number, some
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.parking.store import Lines
from celery_dislock.scripts.names import index_of_lines, sweep_lock
from celery_dislock.servers.server import scan
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.overview import Overview
    from celery_dislock.servers.server import Server

LATELY = 600.0  # seconds: a task that has its turn elsewhere comes more often
LOCKS_MOST = 200  # of each other prefix that are looked at


def strangers(server: Server, prefix: str) -> Iterator[Finding]:
    """Find tasks that come here and have their turn in another store.  A round trip."""
    with suppress(StoreError):
        came = StoreIdentity(server, prefix).last_stranger()
        if came is None or came.ago > LATELY:
            return
        yield Finding(
            "lines",
            WARNING,
            f"A task came {for_people(came.ago)} ago that is parked on another lock server, or "
            "under another prefix: it was put off.",
            "Workers with the old dislock_url or dislock_prefix run such tasks. If none is left: "
            "celery dislock drain --from-url URL, or --from-prefix PREFIX. If that server has lost "
            f"its data: celery dislock drain --lost {came.store}",
        )


def other_prefixes(server: Server, overview: Overview, prefix: str, home: str) -> Iterator[Finding]:
    """
    Find lines under other prefixes that no worker sweeps.  Reads the names of all keys.

    Args:
        server: The lock server.
        overview: Reads its locks.
        prefix: ``dislock_prefix``.
        home: Name of the broker of the app here.
    """
    left: dict[str, int] = {}
    with suppress(StoreError):
        for other in sorted(_prefixes(server, home) - {prefix}):
            if overview.lock(sweep_lock(other, home), most=0).holders:
                continue  # another app's, perhaps
            names = islice(Lines(server, other, home, lambda _turns: None).names(), LOCKS_MOST)
            found = [overview.lock(name, most=1) for name in names]
            parked = sum(lock.waiting + len(lock.turns) for lock in found)
            if parked:
                left[other] = parked
    if left:
        yield Finding(
            "lines",
            WARNING,
            f"{number(sum(left.values()), 'task')} parked under another prefix ({some(left)}), "
            "where no worker sweeps.",
            f"If no worker uses that any more: celery dislock drain --from-prefix {min(left)}",
            listed(left),
        )


def _prefixes(server: Server, home: str) -> set[str]:
    """Return the prefixes under which a broker has, or recently had, lines."""
    ending = index_of_lines("", home)
    found: set[str] = set()
    for send in server.senders():
        for names in scan(send, f"*{ending}"):
            found.update(name.removesuffix(ending) for name in names)
    return found
