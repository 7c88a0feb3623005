"""
Draw timelines as an SVG: the same bars as ``drawing.py`` draws in plain text.

The demo draws the picture of the project's README, too, from what happened in its own run.  This
refreshes it, in the repository's root::

    make demo && cp demo-output/demo.svg docs/_static/

A picture is one file that loads nothing.  It brings its own background: a page that shows it may
be light or dark, whatever the reader's system says.  Where the two agree, the picture does, too.
"""

from __future__ import annotations

import html
import itertools
import re
from typing import TYPE_CHECKING

from example_project.drawing import axis_step, first_and_last, rows
from example_project.timeline import most_at_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from example_project.drawing import Row
    from example_project.stage import Timeline
    from example_project.timeline import Span

# All lengths are in pixels of a picture that is shown in its own size.
WIDTH = 760
MARGIN = 12
HEADLINE, ROW, AXIS, LEGEND = 29, 18, 20, 28  # heights
KEY_GAP, TIMELINE_GAP = 3, 6  # between the rows of two keys, and below a timeline
LETTER, LEGEND_LETTER = 8.5, 7  # widths: of a monospaced letter, of one in the legend on average
LETTER_DROP = 5  # from a letter's middle to the line that it stands on
GAP = 10  # between two things on a line
FIGURE = 64  # room for one on the axis
BAR, TICK, DIAMOND = 12, 6, 6  # heights; of half a diamond
TICK_WIDTH = 2
CROSS = {"cross": 7, "broken": 9}  # sizes
BAR_LEAST = 3  # width
SWATCH = 20  # width of a mark in the legend

LABEL_MOST = 20  # letters of a key, and of a process: bars need room
LENGTH_LEAST = 0.01  # seconds of an axis
BROKEN = ("killed", "lost")  # ends that leave work half done
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

STYLE = """
text { font: 14px ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.label { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.headline { font-size: 16px; font-weight: 600 }
.muted { fill: #57606a }
.figure { text-anchor: middle }
.ground { fill: #ffffff; stroke: #d0d7de }
.band { fill: #f3f5f8 }
.grid { stroke: #d0d7de; fill: none }
.held { fill: #2563b8; stroke: #f3f5f8 }
.unlocked { fill: #dbe7f7; stroke: #2563b8 }
.renewal { stroke: #ffffff; stroke-width: 2; fill: none }
.cap { fill: #f2b632; stroke: #7a4f00 }
.cross { stroke: #a04a00; stroke-width: 2; stroke-linecap: round; fill: none }
.broken { stroke: #c4182a; stroke-width: 3; stroke-linecap: round; fill: none }
text.broken { fill: #c4182a; stroke: none; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.muted { fill: #9da7b3 }
.ground { fill: #0d1117; stroke: #3d444d }
.band { fill: #171d26 }
.grid { stroke: #3d444d }
.held { fill: #58a6ff; stroke: #171d26 }
.unlocked { fill: #16304f; stroke: #58a6ff }
.renewal { stroke: #0d1117 }
.cap { fill: #f2b632; stroke: #0d1117 }
.cross { stroke: #f0a35e }
.broken { stroke: #ff8078 }
text.broken { fill: #ff8078 }
}
"""


def picture(timelines: Sequence[Timeline]) -> str:
    """
    Draw timelines below each other, as one SVG.

    Args:
        timelines: What to draw, from the top down; each has an axis of its own.

    Returns:
        The file's text.  The same timelines give the same text.
    """
    drawn = [(each, rows(each.spans, each.refused, each.others)) for each in timelines]
    sheet = _Sheet([row for _, its_rows in drawn for row in its_rows])
    for timeline, its_rows in drawn:
        sheet.add_timeline(timeline, its_rows)
    sheet.add_legend(_legend(timelines))
    title = "; ".join(map(_headline, timelines)) or "No timeline"
    return sheet.text(title, " ".join(_in_words(*each) for each in drawn))


class _Sheet:
    """What is drawn up to now; the next things go below it."""

    def __init__(self, everything: Sequence[Row]) -> None:
        self._back: list[str] = []  # elements on which the others lie
        self._front: list[str] = []
        self._y = float(KEY_GAP)
        keys = max((len(_short(row.key)) for row in everything), default=0)
        names = max((len(_short(row.who)) for row in everything), default=0)
        self._name_x = MARGIN + keys * LETTER + GAP
        self._left = self._name_x + names * LETTER + GAP
        self._right = WIDTH - 2 * MARGIN  # the last figure of an axis may stick out

    def text(self, title: str, description: str) -> str:
        height = round(self._y)
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img"'
            ' aria-labelledby="picture-title picture-description">'
        )
        lines = [
            opening,
            _tag("title", title, id="picture-title"),
            _tag("desc", description, id="picture-description"),
            f"<style>{STYLE}</style>",
            _tag("rect", cls="ground", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=6),
            *self._back,
            *self._front,
            "</svg>\n",
        ]
        return "\n".join(lines)

    def add_timeline(self, timeline: Timeline, drawn: Sequence[Row]) -> None:
        self._write(MARGIN, self._y + 20, _headline(timeline), "headline")
        self._y += HEADLINE
        if drawn:
            top = self._y
            scale = _Scale(*first_and_last(drawn), self._left, self._right)
            for _, group in itertools.groupby(drawn, key=lambda row: row.key):
                self._add_key(list(group), scale, _kind(timeline))
            self._add_axis(scale, top)
        else:
            self._write(MARGIN, self._y + LETTER_DROP, "Nothing was recorded.", "muted")
            self._y += AXIS
        self._y += TIMELINE_GAP

    def add_legend(self, marks: Mapping[str, str]) -> None:
        x, y = float(MARGIN), self._y + LEGEND / 2 - 2
        for mark, name in marks.items():
            self._front += _swatch(mark, x, y)
            self._write(x + SWATCH + GAP / 2, y + LETTER_DROP, name, "muted")
            x += SWATCH + len(name) * LEGEND_LETTER + 3 * GAP
        self._y += LEGEND

    def _add_key(self, group: Sequence[Row], scale: _Scale, kind: str) -> None:
        height = len(group) * ROW + 2
        edge = MARGIN / 2
        self._back.append(
            _tag("rect", cls="band", x=edge, y=self._y, width=WIDTH - 2 * edge, height=height, rx=4)
        )
        for index, row in enumerate(group):
            y = self._y + 1 + (index + 0.5) * ROW
            if not index:
                self._write(MARGIN, y + LETTER_DROP, _short(row.key), "label")
            self._write(self._name_x, y + LETTER_DROP, _short(row.who), "label muted")
            for span in row.spans:
                self._add_bar(span, y, scale, kind)
            for span, following in itertools.zip_longest(row.spans, row.spans[1:]):
                free_until = scale.x(following.start) if following else self._right
                self._add_marks(span, y, scale, free_until)
            if row.clicks:
                where = sorted(scale.x(at) for at in row.clicks)
                self._front.append(_crosses(where, y, "cross"))
        self._y += height + KEY_GAP

    def _add_bar(self, span: Span, y: float, scale: _Scale, kind: str) -> None:
        start = scale.x(span.start)
        if span.end is None:
            self._front.append(_arrow(start, self._right, y, kind))
        else:
            self._front.append(_bar(start, scale.x(span.end), y, kind))

    def _add_marks(self, span: Span, y: float, scale: _Scale, free_until: float) -> None:
        end = self._right if span.end is None else scale.x(span.end)
        if span.renewals:
            where = [min(scale.x(at), end - TICK_WIDTH) for at in span.renewals]
            self._front.append(_ticks(where, y))
        if span.capped is not None:
            self._front.append(_diamond(scale.x(span.capped), y))
        if span.how in BROKEN:
            self._front.append(_crosses([end], y, "broken"))
            if end + 2 * GAP + len(span.how) * LETTER < free_until:
                self._write(end + GAP, y + LETTER_DROP, span.how, "broken")

    def _add_axis(self, scale: _Scale, top: float) -> None:
        step = axis_step(scale.length, (self._right - self._left) / FIGURE)
        lines = []
        for number in range(int(scale.length / step) + 1):
            x = scale.x(scale.first + number * step)
            lines.append(f"M{_rounded(x)} {_rounded(top)}V{_rounded(self._y + 2)}")
            self._write(x, self._y + 3 * LETTER_DROP, f"{number * step:g} s", "muted figure")
        self._back.append(_tag("path", cls="grid", d="".join(lines)))
        self._y += AXIS

    def _write(self, x: float, y: float, words: str, cls: str) -> None:
        self._front.append(_tag("text", words, cls=cls, x=x, y=y))


class _Scale:
    """Turns times into places from left to right."""

    def __init__(self, first: float, last: float, left: float, right: float) -> None:
        self.first = first
        self.length = max(last - first, LENGTH_LEAST)  # seconds
        self._left = left
        self._second = (right - left) / self.length  # pixels

    def x(self, at: float) -> float:
        return self._left + (at - self.first) * self._second


def _kind(timeline: Timeline) -> str:
    return "held" if timeline.held else "unlocked"


def _headline(timeline: Timeline) -> str:
    return timeline.headline or timeline.title


def _in_words(timeline: Timeline, drawn: Sequence[Row]) -> str:
    """Say what the picture shows, for people who do not see it."""
    told = [_headline(timeline)]
    for key, group in itertools.groupby(drawn, key=lambda row: row.key):
        its_rows = list(group)
        spans = [span for row in its_rows for span in row.spans]
        ends = [span.how for span in spans]
        clicks = sum(len(row.clicks) for row in its_rows)
        parts = [
            f"{'held' if timeline.held else 'ran without a lock'}: {len(spans)}",
            f"most at a time: {most_at_once(spans)}",
            *(f"{end}: {ends.count(end)}" for end in BROKEN if end in ends),
        ]
        if clicks:
            parts.append(f"{timeline.others}: {clicks}")
        told.append(f"{key} ({', '.join(parts)})")
    return ". ".join(told) + "."


def _legend(timelines: Sequence[Timeline]) -> dict[str, str]:
    """Name the marks that these timelines have."""
    spans = [span for timeline in timelines for span in timeline.spans]
    ends = {span.how for span in spans}
    others = dict.fromkeys(timeline.others for timeline in timelines if timeline.refused)
    kinds = {_kind(timeline) for timeline in timelines if timeline.spans}
    names = {
        "held": "lock held" if "held" in kinds else "",
        "unlocked": "ran without a lock" if "unlocked" in kinds else "",
        "renewal": "renewal" if any(span.renewals for span in spans) else "",
        "cap": "cap" if any(span.capped is not None for span in spans) else "",
        "broken": " or ".join(end for end in BROKEN if end in ends),
        "cross": " or ".join(others),
        "lasting": "not ended" if any(span.end is None for span in spans) else "",
    }
    return {mark: name for mark, name in names.items() if name}


def _swatch(mark: str, x: float, y: float) -> list[str]:
    end, middle = x + SWATCH, x + SWATCH / 2
    if mark in {"broken", "cross"}:
        return [_crosses([middle], y, mark)]
    if mark == "cap":
        return [_diamond(middle, y)]
    if mark == "lasting":
        return [_arrow(x, end, y, "held")]
    bar = _bar(x, end, y, "unlocked" if mark == "unlocked" else "held")
    return [bar, _ticks([middle], y)] if mark == "renewal" else [bar]


def _bar(start: float, end: float, y: float, kind: str) -> str:
    width = max(end - start, BAR_LEAST)
    return _tag("rect", cls=kind, x=start, y=y - BAR / 2, width=width, height=BAR, rx=2)


def _arrow(start: float, end: float, y: float, kind: str) -> str:
    tip = min(BAR / 2, end - start)
    corners = [(start, -1), (end - tip, -1), (end, 0), (end - tip, 1), (start, 1)]
    places = (f"{_rounded(x)} {_rounded(y + side * BAR / 2)}" for x, side in corners)
    return _tag("path", cls=kind, d=f"M{'L'.join(places)}Z")


def _ticks(where: Sequence[float], y: float) -> str:
    top = _rounded(y - TICK / 2)
    return _tag("path", cls="renewal", d="".join(f"M{_rounded(x)} {top}v{TICK}" for x in where))


def _diamond(x: float, y: float) -> str:
    size = DIAMOND
    path = f"M{_rounded(x)} {_rounded(y - size)}l{size} {size}l-{size} {size}l-{size} -{size}Z"
    return _tag("path", cls="cap", d=path)


def _crosses(where: Sequence[float], y: float, cls: str) -> str:
    size = CROSS[cls]
    top = _rounded(y - size / 2)
    strokes = f"l{size} {size}m0 -{size}l-{size} {size}"
    path = "".join(f"M{_rounded(x - size / 2)} {top}{strokes}" for x in where)
    return _tag("path", cls=cls, d=path)


def _short(label: str) -> str:
    if len(label) <= LABEL_MOST:
        return label
    return label[: LABEL_MOST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _tag(name: str, words: str = "", **attributes: str | float) -> str:
    """Write an element; *cls* is its class."""
    written = "".join(
        f' {"class" if attribute == "cls" else attribute}="{_escaped(_rounded(value))}"'
        for attribute, value in attributes.items()
    )
    return f"<{name}{written}>{_escaped(words)}</{name}>" if words else f"<{name}{written}/>"


def _rounded(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _escaped(words: str) -> str:
    return html.escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", words))
