"""What ``pause``, ``resume`` and ``limit`` set, and what they say of it."""

from __future__ import annotations

import json

import pytest

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli import session
from tests.unit.operating.cli.conftest import lock


@pytest.fixture
def limits(actions, monkeypatch):
    """What was set, by somebody with a name."""
    monkeypatch.setattr(session.getpass, "getuser", lambda: "me")
    return actions


@pytest.mark.parametrize(
    ("args", "asked", "said", "logged"),
    [
        (
            ["pause", "k"],
            (0, None, "by me"),
            "Lock k is paused until: celery dislock resume k.",
            "paused lock 'k', with the note 'by me'",
        ),
        (
            ["pause", "k", "--for", "10m", "--note", "stop\x1b"],
            (0, 600.0, "by me: stop\x1b"),
            "Lock k is paused for 10 min.",
            r"paused lock 'k' for 10 min, with the note 'by me: stop\x1b'",
        ),
        (
            ["limit", "k", "3"],
            (3, None, "by me"),
            "Lock k admits 3 at a time, until:",
            "limited lock 'k' to 3 leases, with the note 'by me'",
        ),
        (
            ["resume", "k"],
            (None, None, ""),
            "Lock k has the limit of the code again. Nobody had set another.",
            "took back the limit of lock 'k'",
        ),
    ],
)
def test_what_is_set_is_said(dislock, limits, caplog, args, asked, said, logged):
    """With who did it, and how to take it back; in the log, too."""
    answer = dislock(*args)
    assert answer.exit_code == 0
    assert limits.done == [("limit", "dislock:{k}", *asked)]
    assert answer.stdout.startswith(said)
    assert logged in caplog.text


def test_what_was_set_before_is_said(dislock, limits):
    """In words, and as JSON."""
    limits.before = 0
    assert dislock("limit", "k", "2").stdout.endswith("It was paused.\n")
    limits.before = 5
    (told,) = json.loads(dislock("resume", "k", "--json").stdout)
    assert (told["key"], told["limit"], told["before"]) == ("k", None, 5)


def test_a_user_without_a_name(dislock, limits, monkeypatch):
    """As in some containers."""

    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(session.getpass, "getuser", nobody)
    dislock("pause", "k")
    assert limits.done[0][-1] == "by an operator"


def test_what_was_set_before_an_error_is_logged(dislock, limits, caplog, monkeypatch):
    """Of several keys the first is paused, and the lock server goes away."""
    about = {"name": "shop.move", "lock_key": ["a", "b"], "shared": False}
    dislock.app.task(base=SingletonTask, **about)(nothing)

    def fail_later(name, *_args, **_options):
        if name == "dislock:{b}":
            raise StoreError("redis://fake", "away")

    monkeypatch.setattr(limits, "limit", fail_later)
    assert dislock("pause", "--task", "shop.move").exit_code == session.AWAY
    assert ["paused lock 'a'" in one for one in caplog.messages] == [True]


def nothing(): ...


@pytest.mark.parametrize("command", [["pause"], ["resume"], ["limit", "2"]])
def test_a_pattern_is_refused(dislock, limits, command):
    """It would be taken for a key that nobody has, and nothing would be paused."""
    name, *number = command
    answer = dislock(name, "export:*", *number)
    assert answer.exit_code == 2
    assert "looks like a pattern" in answer.stderr
    assert limits.done == []


def test_a_key_that_only_looks_like_a_pattern_can_be_paused(dislock, limits, overview):
    """A value of an argument may have a star in it."""
    overview.put(lock("export:*", waiting=1))
    assert dislock("pause", "export:*").exit_code == 0
    assert len(limits.done) == 1


def test_a_key_that_nobody_knows_is_a_warning(dislock, limits, overview):
    """It may be misspelt; it is paused all the same, as it may be there soon."""
    answer = dislock("pause", "exprot:7", "--json")
    assert answer.exit_code == 0
    assert answer.stderr.startswith("Warning: nobody holds, awaits or reserves lock exprot:7 now.")
    assert json.loads(answer.stdout)[0]["limit"] == 0
    overview.put(lock("export:7", waiting=1))
    assert dislock("pause", "export:7").stderr == ""
