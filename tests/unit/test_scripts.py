"""The scripts as they are sent: with their parts, under their digest."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from celery_dislock import scripts
from celery_dislock.scripts import INCLUDE, KINDS, Script, commands

LOADED = {name: one for name, one in vars(scripts).items() if isinstance(one, Script)}
FILES = [
    file.stem
    for file in Path(scripts.__file__).parent.glob("*.lua")
    if not file.stem.startswith("_")
]


def test_every_script_of_the_folder_is_loaded():
    """Each operation's file is a constant of its name, and no constant is without a file."""
    assert sorted(LOADED) == sorted(name.upper() for name in FILES)


@pytest.mark.parametrize("name", sorted(LOADED))
def test_a_script_is_sent_whole_and_called_by_its_digest(name):
    """No include is left in it, and the digest is that of the text which EVAL brings."""
    script = LOADED[name]
    assert not INCLUDE.search(script.text)
    assert script.sha == hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("name", FILES)
def test_a_scripts_header_begins_with_its_name(name):
    """What MONITOR or SLOWLOG shows of a script begins with the file in which to look it up."""
    assert Script.load(name).text.startswith(f"-- {name}.lua: ")


def test_the_commands_that_scripts_run_are_all_found():
    """A user's permissions are checked for them; no call escapes the pattern that finds them."""
    files = Path(scripts.__file__).parent.glob("*.lua")
    # That one runs what it is given, to find out whether the user may.
    texts = [file.read_text("utf-8") for file in files if file.name != "try.lua"]
    calls = sum(len(re.findall(r"redis\.p?call\b", text)) for text in texts)
    assert calls == sum(len(scripts.CALL.findall(text)) for text in texts)
    assert {"HSET", "TIME"} <= set(commands())
    assert list(commands()) == sorted(set(commands()))


def test_every_key_beside_a_lock_has_a_kind():
    """A key of another kind is damage, so the kinds of all of them are known."""
    assert set(KINDS.values()) <= {"hash", "zset", "list", "string", "set"}
    assert KINDS[""] == "hash"
