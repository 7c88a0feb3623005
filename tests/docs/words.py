"""
Count the words that users are asked to read: ``python -m tests.docs.words``.

Every page counts, with its code, but those for contributors and sceptics in ``docs/inside`` and
the list of changes.  Tables that are made from the code and pictures do not count.
"""

import re
from collections import defaultdict

from tests.docs.page import DOCS, README

NOT_READ = re.compile(
    r"<!-- table: .*?<!-- end of table -->|<!--.*?-->|^```mermaid$.*?^```$",
    re.DOTALL | re.MULTILINE,
)
USERS = [
    README,
    *sorted(
        page
        for page in DOCS.rglob("*.md")
        if not page.is_relative_to(DOCS / "inside") and page != DOCS / "changelog.md"
    ),
]


def words_of(text):
    """Count the words of a page, without comments, pictures, and what is made from the code."""
    return len(NOT_READ.sub("", text).split())


def main():
    """Print the words of each page by its section, and their sum."""
    sections = defaultdict(list)
    for page in USERS:
        section = page.parent.relative_to(DOCS.parent).as_posix()
        sections[section].append((words_of(page.read_text("utf-8")), page.name))
    for section, pages in sections.items():
        print(f"{sum(count for count, _ in pages):6,} {section}")
        for count, name in sorted(pages, reverse=True):
            print(f"{count:14,} {name}")
    print(f"{sum(count for pages in sections.values() for count, _ in pages):6,} in all")


if __name__ == "__main__":
    main()
