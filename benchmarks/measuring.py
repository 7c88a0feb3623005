"""What the sections of the page share: the figures, and the networks that they are measured at."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

NETWORKS = {"0 ms": 0.0, "1 ms": 0.001}  # seconds of a round trip, beside loopback's own


class Figure(NamedTuple):
    """
    What a variant has been measured to take, or to reach.

    Attributes:
        table: Of the page; the variants are its rows.
        measured: What, and in which unit.
        variant: Of what.
        network: A name of `NETWORKS`.
        values: One for each round; a figure that is counted has one.
    """

    table: str
    measured: str
    variant: str
    network: str
    values: Sequence[float]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest rank: a value that was measured."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
