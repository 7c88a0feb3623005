"""The built HTML, without a browser: links, headings, and texts for images."""

import posixpath
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from tests.site.built import MADE_BY_SPHINX, PAGES, read

EVERY_PAGE = pytest.mark.parametrize("name", PAGES + MADE_BY_SPHINX)
NO_HEADING = {"search"}  # Sphinx's script adds its only one, of level 2


@EVERY_PAGE
def test_links_to_other_sites_are_encrypted(site, name):
    """A link that leaves the site uses https, or writes a mail."""
    links = [urlsplit(link) for link in read(site, name).links]
    leaving = [link for link in links if link.scheme or link.netloc]
    assert not [link for link in leaving if link.scheme not in {"https", "mailto"}]


@pytest.mark.parametrize(
    "name", [name for name in PAGES + MADE_BY_SPHINX if name not in NO_HEADING]
)
def test_headings_are_an_outline(site, name):
    """A page has one title, which comes first, and no heading skips a level."""
    headings = read(site, name).headings
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert not [pair for pair in pairwise(headings) if pair[1] > pair[0] + 1]


@pytest.mark.parametrize("name", PAGES)
def test_the_menu_is_that_of_the_pages_readers(site, name):
    """Users' pages are in the menu of users, and what contributors read in one of its own."""
    inside = name.startswith("inside/")
    menu = read(site, name).menu
    assert len(menu) > 5
    named = {posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in menu}
    assert {one.startswith("inside/") for one in named} == {inside}


@EVERY_PAGE
def test_every_image_has_a_text(site, name):
    """Each image says what it shows to readers who do not see it."""
    assert not [image["src"] for image in read(site, name).images if not image.get("alt")]
