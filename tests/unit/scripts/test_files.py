"""The Lua files as text."""

from __future__ import annotations

from celery_dislock.scripts.files import read_lua


def test_a_part_stands_where_it_is_first_included():
    """The text has each part once, with the parts that it needs before it."""
    text = read_lua("claims")
    assert text.startswith("-- claims.lua: ")
    for part in ("_names", "_record", "_parked"):
        assert text.count(f"-- {part}.lua: ") == 1
    assert text.index("local LINE = ") < text.index("local function read(")
    assert "include: _" not in text


def test_a_script_may_stand_within_another():
    """The inner script stands where the outer one includes "the script"; both need some parts."""
    text = read_lua("release", "_ends")
    assert text.startswith("-- _ends.lua: ")
    assert text.count("local LINE = ") == 1
    before, after = text.split("-- release.lua: ")
    assert before.endswith("local function release()\n")
    assert after.endswith(read_lua("_ends").partition("-- include: the script\n")[2])
