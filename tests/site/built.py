"""The built site, read as HTML: what a page links to, what can be linked to, and its headings."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit

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


class Target(NamedTuple):
    """Where a link leads inside the site."""

    file: Path
    anchor: str


class Page(HTMLParser):
    """One built page."""

    def __init__(self, site: Path, name: str) -> None:
        super().__init__()
        self.site = site
        self.file = site / f"{name}.html"
        self.links: list[str] = []  # of anchors, and what the page loads
        self.anchors: set[str] = set()
        self.headings: list[int] = []  # their levels, in reading order
        self.images: list[dict[str, str | None]] = []
        self.feed(self.file.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, and what it can be linked by."""
        given = dict(attrs)
        if link := given.get("href") or given.get("src"):
            self.links.append(link)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "img":
            self.images.append(given)
        if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            self.headings.append(int(tag[1]))

    def target(self, link: str) -> Target | None:
        """Return where a link leads; None if it leaves the site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        anchor = unquote(urldefrag(link).fragment)
        if not parts.path:
            return Target(self.file, anchor)
        return Target((self.file.parent / unquote(parts.path)).resolve(), anchor)


@cache
def read(site: Path, name: str) -> Page:
    """Read a page once, however many link to it."""
    return Page(site, name)
