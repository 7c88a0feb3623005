"""The demo's pictures: marks of what happened, in a well-formed file."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from example_project import demo
from example_project.stage import Timeline
from example_project.svg import STYLE, picture
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


def words(svg):
    """Return all text that is drawn."""
    return ["".join(each.itertext()) for each in parsed(svg).iter(SVG + "text")]


def test_a_hostile_key_stays_text():
    """Markup, quotes and characters that XML forbids neither break the file nor become elements."""
    key = "</text><script>'\"&\x00\x1b\ud800\uffff"
    svg = picture([timeline(span(0, 1, key=key), refused=[(key, 0.5)])])
    assert not list(parsed(svg).iter(SVG + "script"))
    assert "</text><script>'\"&" in parsed(svg).find(SVG + "desc").text
    svg.encode()  # a lone surrogate cannot be written


def test_the_picture_in_the_readme_is_of_the_demo():
    """It has the present style and both scenes, and is low enough; else `make demo` again."""
    svg = README_PICTURE.read_text("utf-8")
    assert STYLE in svg
    assert "killed" in words(svg)
    assert len(of_class(svg, "text", "headline")) == len(demo.IN_README)
    assert float(parsed(svg).get("height")) <= HEIGHT_MOST
