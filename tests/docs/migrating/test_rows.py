"""Each row that compares us with another library has its test."""

import re
from pathlib import Path

from tests.docs.page import DOCS

# At the end of a row: in a comment that nobody sees, or a column.
TESTS = r"(?:<!-- (test_\w+(?:, test_\w+)*) -->|\| `(test_\w+)`) \|$"
PAGES = (DOCS / "migrating.md", DOCS / "inside" / "other-libraries.md")


def rows():
    """Return the rows of the tables in which a row names its test, without the headings."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    named = [table for table in tables if re.search(TESTS, table, re.MULTILINE)]
    return [row for table in named for row in table.splitlines()[2:]]


def test_every_row_names_a_test():
    """Each names tests that exist; each test beside this is on one of the pages."""
    found = {row: re.search(TESTS, row) for row in rows()}
    assert len(found) > 50
    assert [row for row, names in found.items() if names is None] == []
    on_page = {name for names in found.values() if names for name in re.findall(r"\w+", names[0])}
    here = Path(__file__).parent
    tests, own = (
        "".join(file.read_text("utf-8") for file in folder.rglob("test_*.py"))
        for folder in (here.parents[1], here)
    )
    assert [name for name in on_page if f"def {name}(" not in tests] == []
    assert set(re.findall(r"^    def (test_\w+)\(", own, re.MULTILINE)) - on_page == set()
