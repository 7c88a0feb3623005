"""What the processes of a run saw and did, as lines of one file.

Each line is one event of one process, written with one ``write()``, so that a kill cannot tear it.
All processes run on one machine and share its monotonic clock.  An event is written *after* the
instant that it names, and the instant is read so that the event says no more than was known then:
before a question is asked, and before trust is looked at.

An operation begins with ``invoke`` and ends with ``ok``, ``refused`` or ``unknown``.  One without
an end is open: its process died, or never got an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHOWN_EVERY = 0.1  # seconds


class Event(NamedTuple):
    """
    One line of the history.

    Attributes:
        at: Monotonic seconds.
        process: Who saw it.
        what: What it is about, such as "hold" or "task".
        about: The id of the hold, of the task, or of the operation.
        kind: What happened to it, such as "begin" or "end".
        more: Everything else, by name.
    """

    at: float
    process: str
    what: str
    about: str
    kind: str
    more: dict[str, Any]


class History:
    """The file that a process of the run writes into; several threads may."""

    def __init__(self, path: Path, process: str | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._process = process or str(os.getpid())

    def add(
        self, what: str, about: str, kind: str, *, at: float | None = None, **more: object
    ) -> None:
        """Write an event of this instant, or of the instant *at*."""
        at = time.monotonic() if at is None else at
        line = json.dumps([at, self._process, what, about, kind, more])
        os.write(self._file, line.encode() + b"\n")

    def show_life(self) -> None:
        """Note from now on that this process runs, whatever its other threads wait for."""

        def run() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    self.add("process", self._process, "runs")
                    time.sleep(SHOWN_EVERY)

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: Path) -> list[Event]:
    """Return the events of a run in the order of their instants."""
    return sorted(_lines(path), key=lambda event: event.at)


def _lines(path: Path) -> Iterator[Event]:
    with path.open() as lines:
        for line in lines:
            yield Event(*json.loads(line))
