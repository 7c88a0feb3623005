"""The demo's pictures: marks of what happened, in a well-formed file."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from example_project import demo, scenes
from example_project.stage import Outcome, Timeline
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


def test_what_happened_to_a_lock_is_marked():
    """Renewals, cap, kill, refused clicks and a span without an end have their marks."""
    killed = span(0, 4, how="killed", renewals=[1.8e9 + 1, 1.8e9 + 2], capped=1.8e9 + 3)
    svg = picture(
        [timeline(killed, span(5, None, pid=12), refused=[("export:1", 2), ("export:1", 9)])]
    )
    for mark in ("renewal", "cap", "broken", "cross"):
        assert len(of_class(svg, "path", mark)) == 2, mark  # and the legend's
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
