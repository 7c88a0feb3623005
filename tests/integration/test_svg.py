"""The demo's pictures: bars and marks in the right places, in a well-formed file."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from example_project import demo, scenes
from example_project.stage import Outcome, Timeline
from example_project.svg import LABEL_MOST, STYLE, WIDTH, picture
from example_project.timeline import Span

SVG = "{http://www.w3.org/2000/svg}"
README_PICTURE = Path(__file__).parents[2] / "docs" / "_static" / "demo.svg"
HEIGHT_MOST = 420  # of the README's picture: it leaves room for text on the same screen
CONTRAST_LEAST = 4.5  # WCAG AA, of text


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


def test_each_process_of_a_key_has_a_row():
    """Bars of one process share a row; the next process or key has a row below."""
    svg = picture(
        [timeline(span(0, 1), span(1, 2, pid=12), span(2, 3), span(0, 3, key="export:2"))]
    )
    assert [row for _, _, row in bars(svg)] == sorted(row for _, _, row in bars(svg))
    assert len({row for _, _, row in bars(svg)}) == 3
    assert [word for word in words(svg) if "/" in word] == ["w1/11", "w1/12", "w1/11"]
    assert [word for word in words(svg) if word.startswith("export:")] == ["export:1", "export:2"]


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


def test_the_legend_has_only_marks_that_are_drawn():
    """A picture of a lock that was taken and released explains the bar alone."""
    assert words(picture([timeline(span(0, 1))]))[-1] == "lock held"
    unlocked = timeline(span(0, 1, how="ended"), held=False, others="parked", refused=[("k", 0)])
    assert words(picture([unlocked]))[-2:] == ["ran without a lock", "parked"]


def test_a_hostile_key_stays_text():
    """Markup, quotes and characters that XML forbids neither break the file nor become elements."""
    key = "</text><script>'\"&\x00\x1b\ud800\uffff"
    svg = picture([timeline(span(0, 1, key=key), refused=[(key, 0.5)])])
    assert not list(parsed(svg).iter(SVG + "script"))
    assert "</text><script>'\"&" in parsed(svg).find(SVG + "desc").text
    svg.encode()  # a lone surrogate cannot be written


def test_a_long_key_leaves_room_for_the_bars():
    """A key of any length is cut: the bars keep half of the picture."""
    ((left, right, _),) = bars(picture([timeline(span(0, 1, key="export:" * 100))]))
    assert right - left > WIDTH / 2
    assert (
        max(len(word) for word in words(picture([timeline(span(0, 1, key="k" * 99))])))
        == LABEL_MOST
    )


@pytest.mark.parametrize("length", [0, 0.001, 0.43, 18, 59, 600, 1e6], ids="{} s".format)
def test_figures_on_the_axis_stand_apart(length):
    """From milliseconds to days, the axis has figures, and they do not overlap."""
    svg = picture([timeline(span(0, length or 1e-9))])
    places = [float(each.get("x")) for each in of_class(svg, "text", "muted figure")]
    assert places
    assert all(after - before > 50 for before, after in itertools.pairwise(places))


def test_nothing_is_a_picture_too():
    """Without timelines, or in a timeline without spans, the file is well-formed and says so."""
    assert parsed(picture([])).find(SVG + "title").text == "No timeline"
    assert words(picture([timeline()])) == ["Exports", "Nothing was recorded."]
    assert words(picture([timeline(refused=[("export:1", 1)])]))[1:3] == ["export:1", "refused"]


def test_the_same_timelines_give_the_same_file():
    """Neither the order of the clicks nor when a picture is drawn changes a byte."""
    clicks = [("export:2", 3), ("export:1", 2), ("export:1", 1)]
    spans = (span(0, 5), span(0, 5, key="export:2"))
    again = timeline(*spans, refused=clicks[::-1])
    assert picture([timeline(*spans, refused=clicks)]) == picture([again])


def test_people_who_do_not_see_the_picture_are_told():
    """The title is the headline, and the description counts what is drawn."""
    svg = parsed(
        picture([timeline(span(0, 1), span(2, 3, how="killed"), refused=[("export:1", 1)])])
    )
    assert svg.get("role") == "img"
    assert svg.find(SVG + "title").text == "Exports"
    told = "Exports. export:1 (held: 2, most at a time: 1, killed: 1, refused: 1)."
    assert svg.find(SVG + "desc").text == told


def luminance(colour):
    """Return the relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_legible_on_its_background(dark):
    """Text contrasts with both of its backgrounds by 4.5 to 1 or more, in both colour schemes."""
    scheme = STYLE.split("@media")[dark]
    colours = dict(re.findall(r"^(\S[^{]*) \{.*?fill: (#\w{6})", scheme, re.MULTILINE))
    for text in ("text", ".muted", "text.broken"):
        for background in (".ground", ".band"):
            low, high = sorted(luminance(colours[name]) for name in (text, background))
            assert (high + 0.05) / (low + 0.05) >= CONTRAST_LEAST, (text, background)


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
