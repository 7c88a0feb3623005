"""The Lua files of this package, as text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
INCLUDE = re.compile(r"^-- include: ([\w ]+)$", re.MULTILINE)
INNER = "the script"  # what an outer script includes for the one that stands within it


def read_lua(name: str, within: str = "") -> str:
    """
    Read a Lua file, with its includes.  Each file is included once, where it is first needed.

    Args:
        name: Name of the file.
        within: Name of a file that includes this one as "the script"; empty: none.
    """
    included: set[str] = set()

    def read(wanted: str) -> str:
        if wanted in included:
            return ""
        included.add(wanted)
        return INCLUDE.sub(
            lambda found: read(name if found[1] == INNER else found[1]), _written(wanted)
        )

    return read(within or name)


@cache
def _written(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text("utf-8")
