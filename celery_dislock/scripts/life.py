"""The life of one lock, in which each script runs, and calls each command that any script calls.

For the trial of a lock server: a script that the server refuses, or a command that it forbids to
the user, fails here and not in the middle of a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock import scripts
from celery_dislock.scripts.names import (
    KEY_TYPES,
    UNIQUE,
    beat_of,
    crashes_of,
    done_of,
    epoch_of,
    index_of_counts,
    index_of_lines,
    mark_of,
    sweep_lock,
    wake_list,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.scripts import Script

    Argument = str | bytes | float
    Step = tuple[Script, list[str], tuple[Argument, ...]]  # with keys and arguments

TTL_MS = 60_000  # of most keys, if nobody deletes them
ABOVE_TOKENS = 1 << 53  # than any token
TERMS = TTL_MS, "{}", "x:1"
RATED = ("x:9:1/1000", "x:9:3000/1000", "x:9:3000/1000")  # the starts are written anew
MESSAGE = '{"headers":{}}'
BYTES_MOST = 1_000_000  # of a line


class Life:
    """
    The life of a lock in which each script runs, and calls each command that any script calls.

    Args:
        prefix: ``dislock_prefix``.
        tag: The hash tag of all its keys.

    Attributes:
        news: The list by which a waiter is woken, which has an element.
    """

    def __init__(self, prefix: str, tag: str) -> None:
        self._lock = lock = f"{prefix}:{{{tag}}}"
        self._broker = broker = f"{{{tag}}}"
        self.news = wake_list(lock, "b")
        self._counts = f"{index_of_counts(prefix, tag)}:of"
        self._lines = index_of_lines(prefix, broker)
        self._sweep = sweep_lock(prefix, tag)
        self._epoch = epoch_of(prefix, broker)
        self._index = index_of_counts(prefix, tag)

    def keys(self) -> list[str]:
        """Return all keys that there may be."""
        lock = self._lock
        done = [done_of(lock, f"{task}{of}") for task in "tuv" for of in (":0:0", "@1")]
        return [
            *(lock + end for end in KEY_TYPES),
            *(wake_list(lock, owner) for owner in "abcd"),
            *(mark_of(lock, "t"), crashes_of(lock, "t:0:0"), *done),
            *(self._lines, self._sweep, self._epoch, self._index, self._counts),
        ]

    def steps(self) -> Iterator[Step]:
        """Yield the calls of the scripts, in their order.  The first takes its key alone, too."""
        lock, broker = [self._lock], self._broker
        yield scripts.MARK, [mark_of(self._lock, "t")], ("x", TTL_MS)
        yield scripts.CRASH, [crashes_of(self._lock, "t:0:0")], ("x", TTL_MS)
        yield scripts.COUNT, [self._index], (self._counts, TTL_MS, 9, 9, "field", 1)
        yield scripts.COUNTS, [self._index], ()
        yield scripts.ENLIST, [self._lines], (self._lock,)
        yield scripts.LINES, [self._lines], (0, 1)
        yield scripts.EPOCH, [self._epoch], ("", 0, 0, 0, "a")
        yield scripts.RELEASE, [self._sweep], ("a", 0)
        # A lease, and a beat that has another token.
        beat = [self._lock, beat_of(self._lock)]
        yield scripts.ACQUIRE, lock, ("a", *TERMS, 0, 1)
        yield scripts.RENEW, lock, ("a", TTL_MS)
        yield scripts.RENEW_STALLED, lock, ("a", TTL_MS, 0, 0)
        yield scripts.TICKS, beat, ("a", 0, 0, TTL_MS, "entry", 0)
        yield scripts.TICK, beat, ("a", 0, 0, TTL_MS, "entry", 0)
        yield scripts.LOOK, lock, (0, 1)
        yield scripts.FIND, lock, ("a*", 0, 1)
        # A waiter that is handed the lock.
        yield scripts.ACQUIRE, lock, ("b", *TERMS, TTL_MS, 1)
        yield scripts.RELEASE_DEAD, lock, ("a", 0, broker)
        # Two tasks are parked, and leave the line.
        yield self._parking(scripts.PARK, "t")
        yield self._parking(scripts.PARK, "u")
        yield scripts.FREE, lock, ("b", ABOVE_TOKENS, broker, 1)
        yield scripts.KNOWS, lock, ("t:0:0",)
        yield scripts.WHERE, lock, ("t:0:0#",)
        yield scripts.KEEP_TURN, lock, ("t:0:0",)
        yield scripts.GIVE_BACK, lock, ("t:0:0",)
        yield scripts.PUT_BACK, lock, ("", "t:0:0")
        yield scripts.SWEEP, lock, (broker, "[]")
        yield scripts.DROP, lock, (broker, "t:0:0", '"note":1')
        yield scripts.LEAVE, lock, (broker, "u:0:0", "aside", "")
        yield scripts.ASIDE, lock, (0, 1, "u:0:0")
        # Some starts of a lock with rates of a few starts and of many.
        yield scripts.OVERRIDE, lock, (broker, TTL_MS, "", "rate", "1/1000", "pause", "-")
        yield scripts.OVERRIDE, lock, (broker, 0, "", "rate", "", "pause", "")
        for owner, terms in zip("efg", RATED, strict=True):
            yield scripts.ACQUIRE, lock, (owner, TTL_MS, "{}", terms, 0, 1)
        yield scripts.SPENT, lock, ("g", 4, RATED[2])
        yield scripts.SPENT, lock, ("g", 1, RATED[2])
        yield scripts.TAKE_OVER, lock, ("b", "c", "{}")
        # A task with a reservation.
        unique, message = [self._lock + UNIQUE], ("i", "mark", 0)
        begins = *message, "end", TTL_MS
        yield scripts.RESERVE, unique, ("i", TTL_MS, 0, "", "nonce", 1, 0)
        yield scripts.CONFIRM, unique, (*message, TTL_MS, 0)
        yield scripts.BEGIN, unique, (*begins, 0)
        yield scripts.ACQUIRE_UNIQUE, lock, ("d", *TERMS, 0, 1, *begins)
        yield self._parking(scripts.PARK_UNIQUE, "v", *begins)
        yield scripts.RELEASE_UNIQUE, lock, ("d", 0, broker, "v:0:0", 0, *message, "end")
        yield scripts.UNRESERVE, unique, (*message, "end")

    def _parking(self, script: Script, task: str, *begins: Argument) -> Step:
        asked = {
            **dict(zip(("ttl", "holder", "terms"), TERMS, strict=True)),
            "owner": f"{task}@1",
            "from_broker": self._broker,
            "ticket": f"{task}:0:0",
            "marked": 0,
            "message": MESSAGE,
            "most": 0,
            "most_bytes": BYTES_MOST,
            "overflow": "skip",
            "task": "",
            "heeded": 1,
            "sent": 1,
            "index": self._lines,
            "listed": 0,
        }
        return script, [self._lock], (*script.arguments(asked), *begins)
