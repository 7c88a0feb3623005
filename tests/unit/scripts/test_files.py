"""The Lua files as text."""

from __future__ import annotations

from celery_dislock.scripts.files import read_lua


def test_a_part_stands_where_it_is_included():
    """The text has the part, with the parts of that one, instead of the line that names it."""
    text = read_lua("look")
    assert text.startswith("-- look.lua: ")
    assert text.count("local LINE = ") == 1
    assert text.index("local LINE = ") < text.index("local function parse(")
    assert "include: _" not in text
