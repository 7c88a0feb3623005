"""The built HTML, without a browser: links, headings, and texts for images."""

from __future__ import annotations

from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from tests.site.built import MADE_BY_SPHINX, PAGES, read

EVERY_PAGE = pytest.mark.parametrize("name", PAGES + MADE_BY_SPHINX)
NO_HEADING = {"search"}  # Sphinx's script adds its only one, of level 2


@EVERY_PAGE
def test_every_link_leads_somewhere(site, name):
    """Each file that a page links to or loads is in the site, and so is the place on its page."""
    page = read(site, name)
    broken = []
    for link in page.links:
        target = page.target(link)
        if target is None:
            continue
        if not target.file.is_relative_to(site) or not target.file.is_file():
            broken.append(link)
        elif target.anchor and target.file.suffix == ".html":
            found = read(site, target.file.relative_to(site).with_suffix("").as_posix())
            if target.anchor not in found.anchors:
                broken.append(link)
    assert page.links
    assert not broken


@EVERY_PAGE
def test_links_to_other_sites_are_encrypted(site, name):
    """A link that leaves the site uses https, or writes a mail."""
    page = read(site, name)
    leaving = [link for link in page.links if page.target(link) is None]
    assert not [link for link in leaving if urlsplit(link).scheme not in {"https", "mailto"}]


@pytest.mark.parametrize(
    "name", [name for name in PAGES + MADE_BY_SPHINX if name not in NO_HEADING]
)
def test_headings_are_an_outline(site, name):
    """A page has one title, which comes first, and no heading skips a level."""
    headings = read(site, name).headings
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert not [pair for pair in pairwise(headings) if pair[1] > pair[0] + 1]


@EVERY_PAGE
def test_every_image_has_a_text(site, name):
    """Each image says what it shows to readers who do not see it."""
    assert not [image["src"] for image in read(site, name).images if not image.get("alt")]
