"""The demo's pictures: bars and marks in the right places, in a well-formed file."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from example_project import demo, scenes
from example_project.stage import Outcome, Timeline
from example_project.svg import STYLE, WIDTH, picture
from example_project.timeline import Span

SVG = "{http://www.w3.org/2000/svg}"
README_PICTURE = Path(__file__).parents[2] / "docs" / "_static" / "demo.svg"
HEIGHT_MOST = 420  # of the README's picture: it leaves room for text on the same screen


def span(start, end, *, key="export:1", pid=11, how="released", **more):
    """Hold a lock for some seconds of a Unix time like today's."""
    last = None if end is None else 1.8e9 + end
    return Span(key, "w1@host", pid, "id", 1.8e9 + start, last, how if end else "", **more)


def timeline(*spans, refused=(), **more):
    """Draw these spans, under a headline."""
    clicks = [(key, 1.8e9 + at) for key, at in refused]
    return Timeline("who held the lock", list(spans), clicks, headline="Exports", **more)


def parsed(svg):
    """Read a picture as XML."""
    return ET.fromstring(svg)  # noqa: S314  # our own


def of_class(svg, name, cls):
    """Return the elements of a kind and class; those of the legend come last."""
    return [each for each in parsed(svg).iter(SVG + name) if each.get("class") == cls]


def bars(svg):
    """Return left, right and top of the bars, without the legend's."""
    found = [
        [float(each.get(name)) for name in ("x", "width", "y")]
        for each in parsed(svg).iter(SVG + "rect")
        if each.get("class") in {"held", "unlocked"}
    ]
    lowest = max(float(each.get("y")) for each in parsed(svg).iter(SVG + "text"))
    return [(x, x + width, y) for x, width, y in found if y < lowest - 20]


def starts(path):
    """Return the places where the strokes of a path begin."""
    return [float(x) for x in re.findall(r"M([\d.]+)", path.get("d"))]


def words(svg):
    """Return all text that is drawn."""
    return ["".join(each.itertext()) for each in parsed(svg).iter(SVG + "text")]


def test_bars_stand_where_the_locks_were_held():
    """A bar's place and length are its span's share of the axis."""
    first, second = bars(picture([timeline(span(0, 5), span(7.5, 10, pid=12))]))
    pixels = (second[1] - first[0]) / 10  # of a second
    assert first[1] - first[0] == pytest.approx(5 * pixels, abs=0.2)
    assert second[0] - first[0] == pytest.approx(7.5 * pixels, abs=0.2)
    assert second[1] <= WIDTH


def test_what_happened_to_a_lock_is_marked():
    """Renewals, cap, kill, refused clicks and a span without an end have their marks."""
    killed = span(0, 4, how="killed", renewals=[1.8e9 + 1, 1.8e9 + 2], capped=1.8e9 + 3)
    svg = picture(
        [timeline(killed, span(5, None, pid=12), refused=[("export:1", 2), ("export:1", 9)])]
    )
    ((left, right, _), *_) = bars(svg)
    second = (right - left) / 4  # pixels
    ticks, _ = of_class(svg, "path", "renewal")
    assert starts(ticks) == pytest.approx([left + second, left + 2 * second], abs=0.2)
    cap, _ = of_class(svg, "path", "cap")
    assert starts(cap) == pytest.approx([left + 3 * second], abs=0.2)
    end, _ = of_class(svg, "path", "broken")
    assert starts(end) == pytest.approx([right], abs=6)
    crosses, _ = of_class(svg, "path", "cross")
    assert starts(crosses) == pytest.approx([left + 2 * second, left + 9 * second], abs=6)
    assert len(of_class(svg, "path", "held")) == 2  # an arrow, and the legend's
    assert words(svg)[-6:] == ["lock held", "renewal", "cap", "killed", "refused", "not ended"]


def test_a_hostile_key_stays_text():
    """Markup, quotes and characters that XML forbids neither break the file nor become elements."""
    key = "</text><script>'\"&\x00\x1b\ud800\uffff"
    svg = picture([timeline(span(0, 1, key=key), refused=[(key, 0.5)])])
    assert not list(parsed(svg).iter(SVG + "script"))
    assert "</text><script>'\"&" in parsed(svg).find(SVG + "desc").text
    svg.encode()  # a lone surrogate cannot be written


def test_the_demo_leaves_a_picture_of_each_scene(tmp_path):
    """Each scene has a picture, and demo.svg shows two scenes; one that hung shows nothing."""
    outcomes = {scene: Outcome("", timelines=[timeline(span(0, 1))]) for scene, _ in scenes.SCENES}
    outcomes[scenes.reindex].timelines.clear()
    demo.write_pictures(tmp_path, outcomes)
    files = {file.stem: parsed(file.read_text("utf-8")) for file in tmp_path.rglob("*.svg")}
    assert set(files) == {"demo", *(scene.__name__ for scene in outcomes)}
    assert files["demo"].find(SVG + "title").text == "Exports; Exports"
    assert files["reindex"].find(SVG + "title").text == "No timeline"


def test_the_picture_in_the_readme_is_of_the_demo():
    """It has the present style and both scenes, and is low enough; else `make demo` again."""
    svg = README_PICTURE.read_text("utf-8")
    assert STYLE in svg
    assert "killed" in words(svg)
    assert len(of_class(svg, "text", "headline")) == len(demo.IN_README)
    assert float(parsed(svg).get("height")) <= HEIGHT_MOST
