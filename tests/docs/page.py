"""
A page of the documentation, taken apart into what a reader does with it.

Each block of code has a language, and the language says what becomes of it: ``python`` is run,
``pycon`` is typed at a prompt, the lines of ``console`` that begin with ``$`` are typed in a
terminal and the others are what it prints.  A ``python`` block whose first line is a comment with
nothing but a file's name is written to that file; after ``, at the end`` it is added to that file.
An HTML comment before a block, which nobody sees, says what a reader knows from the sentence before
it:

``<!-- terminal: worker -->``
    type it in the terminal of that name, and leave it running
``<!-- printed in: w1 or w2 -->``
    lines that one of these terminals prints by and by
``<!-- before: code -->``
    run this Python first: what the snippet supposes to be there
``<!-- not run: why -->``
    a block that no test can run, with the reason
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *DOCS.rglob("*.md")])

RUN = ("python", "pycon", "console")
SHOWN = ("text", "ini", "yaml", "mermaid")  # formats and outputs: there is nothing to run
DIRECTIVES = ("{toctree}", "{include}", "{eval-rst}")
COMMENT = re.compile(r"<!-- (terminal|printed in|before|not run):\s(.*?)\s?-->\n+\Z", re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|ini))(, at the end)?\n")


@dataclass(frozen=True)
class Block:
    """
    A fenced block of a page.

    Attributes:
        line: Number of the fence's line in the page, from 1.
        word: First words of the comment before it, "terminal" or another of those above; or "".
        said: The rest of that comment.
    """

    language: str
    code: str
    line: int
    word: str = ""
    said: str = ""

    @property
    def file(self):
        """Name of the file that the block shows, or ""."""
        named = FILE.match(self.code)
        return named[1] if named else ""

    @property
    def is_added(self):
        """Whether the block is added to its file, and does not replace it."""
        named = FILE.match(self.code)
        return bool(named and named[2])


def blocks_of(page):
    """Return the blocks of a page, in order."""
    blocks = []
    before = []  # lines since the block before
    code = []
    fence = language = ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(keepends=True), 1):
        if not fence:
            opened = re.match(r"(`{3,})(\S*)", line)
            if opened:
                fence, language = opened.groups()
                at = number
            else:
                before.append(line)
        elif line.rstrip() == fence:
            comment = COMMENT.search("".join(before))
            word, said = comment.groups() if comment else ("", "")
            blocks.append(Block(language, "".join(code), at, word, said))
            before, code, fence = [], [], ""
        else:
            code.append(line)
    return blocks


def without_code(page):
    """Return the text of a page without its blocks and comments."""
    text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
