"""Diagrams, which Mermaid draws in the reader's browser."""

import pytest

from tests.programs import missing
from tests.site.built import WITH_DIAGRAM
from tests.site.conftest import SIZES

SMALLEST = 9  # CSS pixels: the smallest letters that are read without zooming
# A diagram may scroll inside its box, and its letters are the smallest of all its labels.
DRAWINGS = """
() => [...document.querySelectorAll("pre.mermaid")].map(box => {
    const svg = box.querySelector("svg");
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const sizes = [...svg.querySelectorAll("foreignObject, text")]
        .map(label => parseFloat(getComputedStyle(label).fontSize));
    return {
        kind: svg.getAttribute("aria-roledescription"),
        labels: sizes.length,
        letters: Math.min(...sizes) * scale,
        stretched: scale > 1.01,
        right: box.getBoundingClientRect().right,
        hidden: box.scrollWidth - box.clientWidth,
        named: Boolean(svg.querySelector("title")?.textContent.trim()),
    };
})
"""


@pytest.fixture
def drawn(mermaid):
    """Skip a test without Mermaid; in CI it fails."""
    if not mermaid:
        missing("Mermaid")


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("name", WITH_DIAGRAM)
def test_a_diagram_is_drawn_and_can_be_read(drawn, visit, name, size):
    """Each diagram becomes a drawing inside the window, not blown up, in letters one can read."""
    page = visit(f"{name}.html", size)
    drawings = page.evaluate(DRAWINGS)
    assert drawings
    assert not page.get_by_text("Syntax error").count()
    for drawing in drawings:
        assert drawing["kind"] != "error"
        assert drawing["labels"]
        assert drawing["letters"] >= SMALLEST
        assert not drawing["stretched"]
        assert drawing["right"] <= SIZES[size]["width"]


@pytest.mark.parametrize("name", [name for name in WITH_DIAGRAM if not name.startswith("inside/")])
def test_a_diagram_for_users_is_seen_at_once_on_a_phone(drawn, visit, name):
    """None of it is to the right of the window, and a screen reader says what it shows."""
    for drawing in visit(f"{name}.html", "phone").evaluate(DRAWINGS):
        assert drawing["hidden"] <= 0
        assert drawing["named"]
