"""The Lua files: what they spell once, what their headers say, and how they are sent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import celery_dislock
from celery_dislock import scripts
from celery_dislock.scripts import Script, names

PACKAGE = Path(celery_dislock.__file__).parent
REFERENCE = PACKAGE.parent / "docs" / "reference.md"
FILES = {file.stem: file.read_text("utf-8") for file in (PACKAGE / "scripts").glob("*.lua")}
OPERATIONS = sorted(name for name in FILES if not name.startswith("_"))
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
    ":mark:": "string",
}
TYPES = {"zset": "sorted set"}  # as the documentation calls them


def code(text: str) -> str:
    """Return a Lua file without its comments."""
    return re.sub(r"--.*", "", text)


def header(name: str) -> str:
    """Return the comment that a Lua file begins with."""
    return FILES[name].split("\n\n", 1)[0]


@pytest.mark.parametrize("name", sorted(set(FILES) - {"_names"}))
def test_no_other_lua_file_spells_the_name_of_a_key(name):
    """The names of a lock's keys are written in one include."""
    assert re.findall(r"'[^']*:[a-z?]*:?'", code(FILES[name])) == []


def test_no_python_file_spells_the_name_of_a_lock_key():
    """Python reads the names from the scripts' include."""
    spelt = re.compile("|".join(rf"[}}\"']{end}\b" for end in ENDINGS))
    texts = {file: file.read_text("utf-8") for file in PACKAGE.rglob("*.py")}
    assert [file.name for file, text in texts.items() if spelt.search(text)] == []


def test_the_names_of_keys_stay():
    """A lock that is held during an upgrade is found under the same names after it."""
    assert names.wake_list("dislock:{k}", "a/1") == "dislock:{k}:wake:a/1"
    assert names.mark_of("dislock:{k}", "7") == "dislock:{k}:mark:7"
    assert names.aside_of("dislock:{k}") == "dislock:{k}:aside"
    assert names.index_of_lines("dislock", "home") == "dislock:lines:home"
    assert names.sweep_lock("dislock", "home") == "dislock:sweep:{home}"
    single = {end: kind for end, kind in ENDINGS.items() if not end.endswith(":")}
    assert {"": "hash", **single} == names.KINDS


def test_the_reference_lists_the_keys_of_a_lock():
    """The documentation names each key with its type, and no other."""
    row = re.compile(r"^\| `(:\w+:?)(?:<.*>)?` \| ([a-z ]+) \|", re.MULTILINE)
    rows = row.findall(REFERENCE.read_text("utf-8"))
    assert dict(rows) == {end: TYPES.get(kind, kind) for end, kind in ENDINGS.items()}


def test_leases_are_changed_in_one_place():
    """Only put() and drop() change a lease; counting sweeps out ended ones."""
    change = re.compile(r"'(?:HSET|HDEL|HSETNX|HINCRBY|DEL|RENAME)', (?:lock\.name|KEYS\[1\]),")
    found = {name: len(change.findall(code(text))) for name, text in FILES.items()}
    of_locks = {name: number for name, number in found.items() if number}
    assert of_locks == {"_lease": 2, "_grant": 1, "enlist": 1, "delist": 1}


def test_replies_begin_alike_in_lua_and_in_python():
    """What a script answers is what Python takes it for."""
    written = re.findall(r"^local ([A-Z_, ]+) = ([\d, ]+?) +--", FILES["_states"], re.MULTILINE)
    told = {
        name: int(number)
        for some, numbers in written
        for name, number in zip(some.split(", "), numbers.split(", "), strict=True)
    }
    told["DONE"] = told.pop("DONE_BEFORE")  # DONE is the ending of a key there
    assert len(told) == 8
    assert {name: getattr(scripts, name) for name in told} == told


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_header_names_what_the_script_is_given(name):
    """The header has each key and argument that the script reads, what it returns and touches."""
    begin, text = header(name), code(FILES[name])
    assert begin.startswith(f"-- {name}.lua: ")
    given = set(re.findall(r"ARGV\[\d+\]", text))
    assert given <= set(re.findall(r"^-- (ARGV\[\d+\])", begin, re.MULTILINE))
    assert ("KEYS" in text) == bool(re.search(r"^-- KEYS", begin, re.MULTILINE))
    assert "-- Returns  " in begin
    assert re.search(r"^-- Touches |^-- .*\. +Touches ", begin, re.MULTILINE)


def test_a_script_is_sent_by_its_digest_or_by_its_text():
    """Both forms run the same script with the same keys and arguments."""
    script = Script("return 1", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db")
    assert script.by_digest(["a", "b"], 3) == (b"EVALSHA", script.sha, 2, "a", "b", 3)
    assert script.by_text([], "x", b"y") == (b"EVAL", "return 1", 0, "x", b"y")
