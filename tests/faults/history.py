"""Who trusted which lease from when to when, and whether two did at once.

Processes that hold locks write lines into one file while they do; the checker reads them
afterwards.  A line says "at this instant I trusted this lease", so a process that was stopped or
killed claims nothing that it did not believe: its interval ends with its last line.  Instants are
of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass
class Interval:
    """One lease, from its first to its last instant of trust."""

    key: str
    token: int
    holder: str
    begin: float
    end: float


class Journal:
    """The file that processes write into; a line is one write, so that a kill cannot tear it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def trusted(self, key: str, token: int, holder: str, at: float) -> None:
        """Write that *holder* trusted this lease at this instant."""
        os.write(self._file, json.dumps([key, token, holder, at]).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: Path) -> list[Interval]:
    """Read a journal: an interval per lease, by key and begin."""
    intervals: dict[tuple[str, int, str], Interval] = {}
    for line in path.read_text().splitlines():
        key, token, holder, at = json.loads(line)
        interval = intervals.setdefault((key, token, holder), Interval(key, token, holder, at, at))
        interval.begin = min(interval.begin, at)
        interval.end = max(interval.end, at)
    return sorted(intervals.values(), key=lambda interval: (interval.key, interval.begin))


def violations(intervals: Iterable[Interval]) -> list[str]:
    """
    Check that each lock had one holder at a time, and that its tokens grew.

    Returns:
        A sentence for each pair that breaks it; empty where all is well.
    """
    found = []
    by_key: dict[str, list[Interval]] = {}
    for interval in intervals:
        by_key.setdefault(interval.key, []).append(interval)
    for key, leases in by_key.items():
        leases.sort(key=lambda interval: interval.begin)
        longest = leases[0]
        for before, lease in pairwise(leases):
            longest = max(longest, before, key=lambda interval: interval.end)
            if lease.begin <= longest.end:
                overlap = min(longest.end, lease.end) - lease.begin
                found.append(
                    f"{key}: {longest.holder} and {lease.holder} at once, for {overlap:.6f} s"
                )
            if lease.token <= before.token:
                found.append(
                    f"{key}: token {lease.token} of {lease.holder} after {before.token} "
                    f"of {before.holder}"
                )
    return found
