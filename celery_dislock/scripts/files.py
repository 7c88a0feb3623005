"""The Lua files of this package, as text."""

from __future__ import annotations

import re
from importlib import resources

INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


def read_lua(name: str) -> str:
    """Read a Lua file, with its includes."""
    text = (resources.files(__package__) / f"{name}.lua").read_text("utf-8")
    return INCLUDE.sub(lambda found: read_lua(found[1]), text)
