"""The Lua files of this package, as text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


@cache
def read_lua(name: str) -> str:
    """Read a Lua file, with its includes."""
    text = (FOLDER / f"{name}.lua").read_text("utf-8")
    return INCLUDE.sub(lambda found: read_lua(found[1]), text)
