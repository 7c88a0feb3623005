"""What the benchmarks share: rounds that take turns, and the table of what came out."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
QUICK_SHARE = 10  # one round in ten
WORSE = 1.5  # times the recorded ratio: it fell by a third
_quick: list[bool] = []

HEADINGS = ("measured", "ours", "peer", "peer's", "ratio", "min-max", "target", "reached")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        measured: What, and in which unit.
        ours: Our figure.
        peer: Beside what.
        peers: Its figure.
        ratios: Ours to the peer's, one per round; what it means is up to the benchmark.
        target: What is to be reached, in words; empty where the line is there for comparison.
        reached: Whether it was; None where there is no target.
    """

    measured: str
    ours: str
    peer: str = ""
    peers: str = ""
    ratios: Sequence[float] = ()
    target: str = ""
    reached: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The line's texts, one per heading."""
        middle = f"{median(self.ratios):.2f}" if self.ratios else ""
        spread = f"{min(self.ratios):.2f}-{max(self.ratios):.2f}" if len(self.ratios) > 1 else ""
        reached = {None: "", True: "yes", False: "NO"}[self.reached]
        return (
            self.measured,
            self.ours,
            self.peer,
            self.peers,
            middle,
            spread,
            self.target,
            reached,
        )


def be_quick() -> None:
    """Take a tenth of the rounds from now on, three at least."""
    _quick.append(True)


def take_turns(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """
    Measure each variant once per round, so that what else the machine does hits all alike.

    Args:
        variants: By name, what runs a variant and returns its figure.
        rounds: How many; each begins with another variant, since the first may find cold caches.

    Returns:
        By name, a figure per round.
    """
    if _quick:
        rounds = min(rounds, max(3, rounds // QUICK_SHARE))
    names = list(variants)
    figures: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            figures[name].append(variants[name]())
    return figures


def ratios(ours: Sequence[float], peers: Sequence[float]) -> list[float]:
    """Divide round by round: two figures of one round were measured under like conditions."""
    return [our / their for our, their in zip(ours, peers, strict=True)]


def fallen(rows: Sequence[Row], recorded: Mapping[str, float]) -> Iterator[str]:
    """
    Describe each ratio that is worse than the recorded one by more than a third.

    Args:
        rows: What was measured.  The target says whether more or less is better.
        recorded: Ratio by what was measured.
    """
    for row in rows:
        before = recorded.get(row.measured)
        if before is None or not row.ratios:
            continue
        now = median(row.ratios)
        worse = now / before if row.target.startswith("<") else before / now
        if worse > WORSE:
            yield f"{row.measured}: ratio {now:.2f}, recorded {before:.2f}"


def print_table(rows: Sequence[Row], speed: float) -> None:
    """Print what was measured; *speed* is the microseconds of two bare round trips."""
    table = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, tuple("-" * width for width in widths))
    versions = ", ".join(f"{name} {version(name)}" for name in ("celery", "redis"))
    print(f"Python {platform.python_version()}, {versions}; two bare round trips: {speed:.0f} us\n")
    for cells in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip())
