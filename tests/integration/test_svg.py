from pathlib import Path
from xml.etree import ElementTree as ET

from example_project import demo
from example_project.svg import STYLE

SVG = "{http://www.w3.org/2000/svg}"
README_PICTURE = Path(__file__).parents[2] / "docs" / "_static" / "demo.svg"
HEIGHT_MOST = 420  # of the README's picture: it leaves room for text on the same screen


def test_the_picture_in_the_readme_is_of_the_demo():
    """It has the present style and both scenes, and is low enough; else `make demo` again."""
    svg = README_PICTURE.read_text("utf-8")
    picture = ET.fromstring(svg)  # noqa: S314 -- our own
    texts = list(picture.iter(SVG + "text"))
    assert STYLE in svg
    assert "killed" in ["".join(text.itertext()) for text in texts]
    assert [text.get("class") for text in texts].count("headline") == len(demo.IN_README)
    assert float(picture.get("height")) <= HEIGHT_MOST
