"""Each row of docs/migrating.md has its test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.page import DOCS

PAGE = DOCS / "migrating.md"


def rows() -> list[str]:
    """Return the rows of the page's tables whose last column is a test, without the headings."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text("utf-8"), re.MULTILINE)
    lines = [table.splitlines() for table in tables]
    return [row for heading, _, *rest in lines if heading.endswith("| test |") for row in rest]


def test_every_row_names_a_test():
    """The last column of each table is a test that exists; each test beside this is on the page."""
    named = {row: re.search(r"\| `(\w+)` \|$", row) for row in rows()}
    assert [row for row, name in named.items() if name is None] == []
    here = Path(__file__).parent
    tests, own = (
        "".join(file.read_text("utf-8") for file in folder.rglob("test_*.py"))
        for folder in (here.parents[1], here)
    )
    on_page = {name[1] for name in named.values() if name}
    assert [name for name in on_page if f"def {name}(" not in tests] == []
    assert set(re.findall(r"^    def (test_\w+)\(", own, re.MULTILINE)) - on_page == set()
