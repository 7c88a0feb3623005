"""The scripts: what their headers say, what they answer, and how they are sent."""

import hashlib
import re
from pathlib import Path

import pytest

from celery_dislock import scripts
from celery_dislock.scripts import Script
from celery_dislock.scripts.files import INCLUDE
from celery_dislock.servers import replies

LOADED = {name: one for name, one in vars(scripts).items() if isinstance(one, Script)}
FILES = {file.stem: file.read_text("utf-8") for file in Path(scripts.__file__).parent.glob("*.lua")}
OPERATIONS = sorted(name for name in FILES if not name.startswith("_"))
WITHIN = {"ACQUIRE_UNIQUE", "PARK_UNIQUE", "RELEASE_UNIQUE"}  # scripts within another


def code(text):
    """Return a Lua file without its comments."""
    return re.sub(r"--.*", "", text)


def test_every_script_of_the_folder_is_loaded():
    """Each operation's file is a constant of its name, and no other constant is without a file."""
    assert set(LOADED) == {name.upper() for name in OPERATIONS} | WITHIN


@pytest.mark.parametrize("name", sorted(LOADED))
def test_a_script_is_sent_whole_and_called_by_its_digest(name):
    """No include is left in it, and the digest is that of the text which EVAL brings."""
    script = LOADED[name]
    assert not INCLUDE.search(script.text)
    assert script.sha == hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_header_names_what_the_script_is_given(name):
    """The header has each key and argument that the script reads, what it returns and touches."""
    begin, text = FILES[name].split("\n\n", 1)[0], code(FILES[name])
    assert begin.startswith(f"-- {name}.lua: ")
    given = set(re.findall(r"ARGV\[\d+\]", text))
    assert given <= set(re.findall(r"^-- (ARGV\[\d+\])", begin, re.MULTILINE))
    for unpacked in re.findall(r"^(?:local )?([\w, ]+) = .*unpack\(ARGV", text, re.MULTILINE):
        for one in unpacked.split(", "):
            assert re.search(rf"^-- .* {one}(_ms)?\b", begin, re.MULTILINE)
    assert ("KEYS" in text) == bool(re.search(r"^-- KEYS", begin, re.MULTILINE))
    assert "-- Returns  " in begin
    if INCLUDE.findall(FILES[name]) != ["_unique"]:  # which touches that record alone
        assert re.search(r"^-- Touches |^-- .*\. +Touches ", begin, re.MULTILINE)


def test_leases_are_read_and_written_in_one_place():
    """One function parses a lease's record and one writes it; put() and drop() alone end leases.

    Counting sweeps out those that have ended, and the usual release comes before these are defined.
    """
    change = re.compile(
        r"'(?:HSET|HDEL|HSETNX|HINCRBY|DEL|RENAME)', (?:name|KEYS\[1\]|lock(?:\.name)?),"
    )
    found = {name: len(change.findall(code(text))) for name, text in FILES.items()}
    found["enlist"] = 0
    of_locks = {name: number for name, number in found.items() if number}
    assert of_locks == {"_record": 1, "_lease": 2, "_grant": 1, "release": 2}
    formats = {name for name, text in FILES.items() if "(%a+[%d:]*) (.*)$" in code(text)}
    assert formats == {"_record"}


def test_a_waiter_knows_for_how_long_a_lock_is_reserved():
    """The scripts count it in milliseconds."""
    assert f"local TAKE_UP_MS = {replies.TAKE_UP * 1000:g} " in FILES["_record"]


def test_replies_begin_alike_in_lua_and_in_python():
    """What a script answers is what Python takes it for."""
    states = FILES["_states"] + FILES["leave"]
    written = re.findall(r"^local ([A-Z_, ]+) = ([\d, ]+?) +--", states, re.MULTILINE)
    told = {
        name: int(number)
        for some, numbers in written
        for name, number in zip(some.split(", "), numbers.split(", "), strict=True)
    }
    told["DONE"] = told.pop("DONE_BEFORE")  # DONE is the ending of a key there
    assert len(told) == 11
    assert {name: getattr(scripts, name) for name in told} == told


def test_arguments_are_given_by_name():
    """They are put in the order in which the script unpacks them, also by the script around it."""
    given = {name: number for number, name in enumerate(scripts.PARK.names)}
    assert scripts.PARK.names[:2] == ["owner", "ttl"]
    assert scripts.PARK.names[-1] == "listed"
    assert scripts.PARK.arguments(dict(reversed(given.items()))) == tuple(range(len(given)))
    assert scripts.PARK_UNIQUE.names == scripts.PARK.names
