"""The journal of a pool process: what it has locked in bodies, for its worker's main process.

The main process can compute the key of a task, but not that of a lock that the task's body takes.
So a pool process writes these locks into a file of its own, before it asks for one.  The main
process reads the file when the process has died.  This costs no round trip, and both are on one
machine.

The file has one line that counts, which one call writes: a process that is killed leaves it whole.
It may name leases that have ended since: to release one again changes nothing, as its owner's name
is used once.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.locks.lease import Attempt, Lease

T = TypeVar("T")


class Entry(NamedTuple):
    """
    A lock that a process has or has asked for.

    Attributes:
        names: The names in Redis of its keys' locks.
        owner: The owner.
        holder: The owner's description.
    """

    names: Sequence[str]
    owner: str
    holder: dict[str, Any]


class Journal:
    """
    The journal of a pool process: what it has locked in bodies.

    Args:
        folder: The folder that the main process reads.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, str(os.getpid()))
        self._file: int | None = None
        self._asking: dict[str, Entry] = {}
        self._leases: WeakSet[Lease] = WeakSet()
        self._mutex = threading.RLock()

    def around(self, ask: Callable[[Attempt], T], attempt: Attempt, names: Sequence[str]) -> T:
        """
        Write down what an attempt asks for, and let it ask.

        The entry is kept as long as its lease; if it has got none, it is dropped.
        """
        with self._mutex:
            self._asking[attempt.owner] = Entry(names, attempt.owner, dict(attempt.holder))
            self._write()
        try:
            return ask(attempt)
        finally:
            with self._mutex:
                self._asking.pop(attempt.owner, None)
                if attempt.lease is not None:
                    self._leases.add(attempt.lease)

    def _write(self) -> None:
        held = [
            Entry(lease.lock.names, lease.owner, dict(lease.holder))
            for lease in self._leases
            if not lease.finished
        ]
        line = json.dumps([*self._asking.values(), *held]).encode() + b"\n"
        with suppress(OSError):  # a full disk: the locks end with their expiry, if the process dies
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, line, 0)


def read(path: Path) -> list[Entry]:
    """Return the entries of a process; empty if they cannot be read."""
    try:
        line, _, _ = path.read_bytes().partition(b"\n")
        return [Entry(*fields) for fields in json.loads(line)]
    except (OSError, ValueError, TypeError):
        return []
