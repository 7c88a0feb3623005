"""Every page in a browser: on a desk and on a phone, by day and by night."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.site.built import MADE_BY_SPHINX, PAGES

EVERY_PAGE = pytest.mark.parametrize("name", PAGES + MADE_BY_SPHINX)
EVERY_SIZE = pytest.mark.parametrize("size", ["desktop", "phone"])

# The column of the text scrolls by itself on a phone, which is no better than a page that does.
TOO_WIDE = """
() => [document.documentElement, document.querySelector(".content")]
    .filter(box => box.scrollWidth > Math.min(box.clientWidth, innerWidth) + 1)
    .map(box => `${box.tagName} ${box.className}: ${box.scrollWidth} of ${box.clientWidth}`)
"""
NOT_LOADED = """
() => [...document.images]
    .filter(image => !(image.complete && image.naturalWidth))
    .map(image => image.src)
"""
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "resultTypes": ["violations"],
    "rules": {
        # Browsers let the keyboard scroll a box that has nothing to focus; the rule does not know.
        "scrollable-region-focusable": {"enabled": False}
    },
}


@EVERY_SIZE
@EVERY_PAGE
def test_a_page_fits_its_window(visit, faults, name, size):
    """A page scrolls down only, shows its images, and the browser finds no fault with it."""
    page = visit(f"{name}.html", size)
    assert not page.evaluate(TOO_WIDE)
    assert not page.evaluate(NOT_LOADED)
    assert not faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
@EVERY_PAGE
def test_everybody_can_read_a_page(visit, name, scheme):
    """A page breaks no rule of WCAG 2.1, levels A and AA, in either colour scheme."""
    results = Axe().run(visit(f"{name}.html", scheme=scheme), options=RULES)
    assert not results.violations_count, results.generate_report()
