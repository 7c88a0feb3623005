"""The built site, read as HTML: what a page links to, its headings and its images."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "docs"
PAGES = sorted(
    path.relative_to(SOURCES).with_suffix("").as_posix() for path in SOURCES.rglob("*.md")
)
WITH_DIAGRAM = [
    name for name in PAGES if "```mermaid" in (SOURCES / f"{name}.md").read_text("utf-8")
]
MADE_BY_SPHINX = ["genindex", "search"]
MERMAID = "_static/mermaid.esm.min.mjs"  # where DOCS_MERMAID puts it; see docs/conf.py


class Page(HTMLParser):
    """One built page."""

    def __init__(self, site: Path, name: str) -> None:
        super().__init__()
        self.links: list[str] = []  # of anchors, and what the page loads
        self.menu: list[str] = []  # pages that the menu names
        self.headings: list[int] = []  # their levels, in reading order
        self.images: list[dict[str, str | None]] = []
        self._in_menu = False
        self.feed((site / f"{name}.html").read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, and what it is."""
        given = dict(attrs)
        if link := given.get("href") or given.get("src"):
            self.links.append(link)
        if tag == "aside":
            self._in_menu = given.get("class") == "sidebar-drawer"
        if self._in_menu and "reference" in (given.get("class") or "") and link != "#":
            self.menu.append(str(link))
        if tag == "img":
            self.images.append(given)
        if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            self.headings.append(int(tag[1]))

    def handle_endtag(self, tag: str) -> None:
        """Note the end of the menu."""
        if tag == "aside":
            self._in_menu = False


@cache
def read(site: Path, name: str) -> Page:
    """Read a page once, however many tests look at it."""
    return Page(site, name)
