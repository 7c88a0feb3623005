"""
Draw spans of time as bars on a common axis, in plain text.

::

    export:1   w1/311  ├──·──·──·──┤
    export:1   skipped  x   x  x
                       0s    1s    2s
"""

from __future__ import annotations

import math
import shutil
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from example_project.timeline import Span

WIDTH_LEAST, WIDTH_MOST = 60, 120  # characters
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # seconds between two figures on the axis
ROOM_FOR_FIGURE = 8  # characters


class Row(NamedTuple):
    """What stands on one line: the spans of a process, or the clicks that did not get in."""

    key: str
    who: str  # worker and process, or what became of the clicks
    spans: Sequence[Span] = ()
    clicks: Sequence[float] = ()  # Unix times


def rows(
    spans: Iterable[Span], refused: Iterable[tuple[str, float]] = (), others: str = "refused"
) -> list[Row]:
    """
    Sort what happened into rows: the processes of a key in the order of their first spans.

    Args:
        spans: What to draw.
        refused: Key and Unix time of each click that did not get in: the last row of its key.
        others: What became of these clicks, in one word.
    """
    found: dict[str, dict[str, list[Span]]] = {}
    for span in sorted(spans, key=lambda span: (span.key, span.start)):
        who = f"{span.worker.split('@')[0]}/{span.pid}"
        found.setdefault(span.key, {}).setdefault(who, []).append(span)
    clicks: dict[str, list[float]] = {}
    for key, at in refused:
        clicks.setdefault(key, []).append(at)
    sorted_rows = []
    for key in sorted({*found, *clicks}):
        sorted_rows += [Row(key, who, spans=row) for who, row in found.get(key, {}).items()]
        if key in clicks:
            sorted_rows.append(Row(key, others, clicks=clicks[key]))
    return sorted_rows


def first_and_last(drawn: Iterable[Row]) -> tuple[float, float]:
    """Return the Unix times between which everything in these rows happened; there is something."""
    times: list[float] = []
    for row in drawn:
        times += row.clicks
        times += [at for span in row.spans for at in (span.start, span.end, *span.renewals) if at]
    return min(times), max(times)


def axis_step(length: float, most: float) -> float:
    """Return the seconds between two figures, for an axis of *length* with *most* figures."""
    longest = STEPS[-1]
    fits = (step for step in STEPS if length / step <= most)
    return next(fits, longest * math.ceil(length / longest / most))


class Marks(NamedTuple):
    """The characters that a timeline is drawn with."""

    start: str
    line: str
    renewal: str
    cap: str
    ends: Mapping[str, str]  # by the event that ended the span
    running: str  # the span lasts
    brief: str  # begins and ends in one column
    refused: str


FINE = Marks(
    start="├",
    line="─",
    renewal="·",
    cap="◆",
    ends={"released": "┤", "ended": "┤", "lost": "X", "killed": "X"},
    running="…",
    brief="│",
    refused="x",
)
PLAIN = Marks(
    start="|",
    line="-",
    renewal="+",
    cap="#",
    ends={"released": "|", "ended": "|", "lost": "X", "killed": "X"},
    running=">",
    brief="|",
    refused="x",
)


def marks() -> Marks:
    """Return the fine characters, or plain ASCII where standard output cannot show them."""
    try:
        "├─·◆┤…│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return FINE


def legend() -> str:
    """Explain the characters in one line."""
    use = marks()
    return (
        f"{use.start}{use.line}{use.line}{use.ends['released']} held, {use.renewal} renewal, "
        f"{use.cap} cap reached, {use.ends['killed']} killed, {use.refused} refused or parked"
    )


def text_width() -> int:
    """Return how many characters a line may have."""
    columns = shutil.get_terminal_size(fallback=(100, 24)).columns
    return min(max(columns, WIDTH_LEAST), WIDTH_MOST)


def draw(
    spans: Sequence[Span],
    refused: Iterable[tuple[str, float]] = (),
    others: str = "refused",
    *,
    indent: str = "  ",
) -> list[str]:
    """
    Draw the spans, a line for each key and process, and a line for the clicks that did not get in.

    Args:
        spans: What to draw; the axis begins with the first and ends with the last of them.
        refused: Key and Unix time of each such click.
        others: What became of them, in one word.
        indent: Put before every line.

    Returns:
        The lines, the axis last; nothing where there are no spans.
    """
    if not spans:
        return []
    use = marks()
    drawn = rows(spans, refused, others)
    key_width = max(len(row.key) for row in drawn)
    label_width = key_width + 2 + max(len(row.who) for row in drawn)
    columns = text_width() - len(indent) - label_width - 2
    scale = _Scale(*first_and_last(drawn), columns)

    lines = []
    for row in drawn:
        line = [" "] * columns
        for span in row.spans:
            _draw_bar(line, span, scale, use)
        for at in row.clicks:
            line[scale.column(at)] = use.refused
        lines.append(_labelled(indent, row.key, row.who, key_width, label_width, line))
    lines.append(_labelled(indent, "", "", key_width, label_width, scale.axis()))
    return lines


class _Scale:
    """Turns times into columns."""

    def __init__(self, first: float, last: float, columns: int) -> None:
        self._first = first
        self._columns = columns
        self._length = max(last - first, 0.01)

    def column(self, at: float) -> int:
        share = (at - self._first) / self._length
        return min(max(round(share * (self._columns - 1)), 0), self._columns - 1)

    def axis(self) -> list[str]:
        step = axis_step(self._length, self._columns / ROOM_FOR_FIGURE)
        line = [" "] * self._columns
        for number in range(int(self._length / step) + 1):
            figure = f"{number * step:g}s"
            start = min(self.column(self._first + number * step), self._columns - len(figure))
            line[start : start + len(figure)] = figure
        return line


def _draw_bar(line: list[str], span: Span, scale: _Scale, use: Marks) -> None:
    start = scale.column(span.start)
    end = len(line) - 1 if span.end is None else scale.column(span.end)
    for column in range(start, end):
        line[column] = use.line
    for at in span.renewals:
        line[scale.column(at)] = use.renewal
    line[start] = use.start
    line[end] = use.brief if start == end else use.ends.get(span.how, use.running)
    if span.capped is not None:
        line[min(scale.column(span.capped), max(end - 1, start))] = use.cap


def _labelled(
    indent: str, key: str, who: str, key_width: int, label_width: int, line: list[str]
) -> str:
    label = f"{key:<{key_width}}  {who}"
    return f"{indent}{label:<{label_width}}  {''.join(line)}".rstrip()
