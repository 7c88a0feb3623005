"""The names of Redis keys: spelt once, and the same in Lua, in Python and in the documentation."""

import re
from pathlib import Path

import pytest

import celery_dislock
from celery_dislock.scripts import names

PACKAGE = Path(celery_dislock.__file__).parent
REFERENCE = PACKAGE.parent / "docs" / "inside" / "redis.md"
LUA = {file.stem: file.read_text("utf-8") for file in PACKAGE.rglob("*.lua")}
ENDINGS = {
    ":line": "zset",
    ":places": "hash",
    ":wake:": "list",
    ":tickets": "hash",
    ":handed": "zset",
    ":running": "hash",
    ":replaced": "hash",
    ":aside": "hash",
    ":done:": "string",
    ":crashes:": "hash",
    ":mark:": "string",
    ":unsent:": "string",
    ":unique": "string",
    ":newest": "hash",
    ":limit": "string",
    ":starts": "list",
    ":lasted": "string",
    ":beat": "hash",
}
TYPES = {"zset": "sorted set"}  # as the documentation calls them


@pytest.mark.parametrize("name", sorted(set(LUA) - {"_names"}))
def test_no_other_lua_file_spells_the_name_of_a_key(name):
    """The names of a lock's keys are written in one include."""
    assert re.findall(r"'[^']*:[a-z?]*:?'", re.sub(r"--.*", "", LUA[name])) == []


def test_no_python_file_spells_the_name_of_a_lock_key():
    """Python reads the names from the scripts' include."""
    spelt = re.compile("|".join(rf"[}}\"']{end}\b" for end in ENDINGS))
    texts = {file: file.read_text("utf-8") for file in PACKAGE.rglob("*.py")}
    assert [file.name for file, text in texts.items() if spelt.search(text)] == []


def test_the_names_of_keys_stay():
    """A lock that is held during an upgrade is found under the same names after it."""
    assert names.wake_list("dislock:{k}", "a/1") == "dislock:{k}:wake:a/1"
    assert names.mark_of("dislock:{k}", "7") == "dislock:{k}:mark:7"
    assert names.crashes_of("dislock:{k}", "7:0:0") == "dislock:{k}:crashes:7:0:0"
    assert names.beat_of("dislock:{k}") == "dislock:{k}:beat"
    assert names.aside_of("dislock:{k}") == "dislock:{k}:aside"
    assert names.index_of_lines("dislock", "home") == "dislock:lines:home"
    assert names.sweep_lock("dislock", "home") == "dislock:sweep:{home}"
    assert names.epoch_of("dislock", "home") == "dislock:epoch:home"
    single = {end: kind for end, kind in ENDINGS.items() if not end.endswith(":")}
    assert {"": "hash", **single} == names.KEY_TYPES


def test_the_reference_lists_the_keys_of_a_lock():
    """The documentation names each key with its type, and no other."""
    row = re.compile(r"^\| `(:\w+:?)(?:<.*>)?` \| ([a-z ]+) \|", re.MULTILINE)
    rows = row.findall(REFERENCE.read_text("utf-8"))
    assert dict(rows) == {end: TYPES.get(kind, kind) for end, kind in ENDINGS.items()}
