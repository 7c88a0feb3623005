"""``pause``, ``resume``, ``limit``: how many a lock admits, what is told and logged."""

from __future__ import annotations

import pytest

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli import session
from tests.commands import AWAY, USAGE
from tests.staged import lock


@pytest.fixture(autouse=True)
def _me(monkeypatch):
    monkeypatch.setattr(session.getpass, "getuser", lambda: "me")
    monkeypatch.setattr(session, "gethostname", lambda: "here")


@pytest.mark.parametrize(
    ("args", "kept", "said", "logged"),
    [
        (
            ["pause", "k"],
            (0, None, "by me"),
            "Lock k is paused until: celery dislock resume k. Who has the lock keeps it. It adm",
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
            "Lock k has the limit of the code again.",
            "took back the limit of lock 'k'",
        ),
    ],
)
def test_what_is_set_is_said(dislock, server, caplog, args, kept, said, logged):
    """With who did it, how to take it back and what was set before; in the log, too."""
    server.put(lock(limit=5))
    answer = dislock(*args)
    assert (answer.exit_code, answer.stderr) == (0, "")
    found = server.overview.lock("dislock:{k}")
    assert (found.limit, found.limit_remaining, found.limit_note) == kept
    assert answer.stdout.startswith(said)
    assert logged in caplog.text
    server.put(lock(limit=0))
    assert "paused" in dislock("limit", "k", "2").stdout
    (told,) = dislock.json("resume", "k")
    assert (told["key"], told["limit"], told["before"]) == ("k", None, 2)


def test_a_user_without_a_name(dislock, server, monkeypatch):
    """As in some containers."""

    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(session.getpass, "getuser", nobody)
    dislock("pause", "k")
    assert server.overview.lock("dislock:{k}").limit_note == "by an operator"


def test_what_was_set_before_an_error_is_logged(dislock, server, caplog, monkeypatch):
    """Of several keys the first is paused, and the lock server goes away."""

    @dislock.app.task(base=SingletonTask, name="shop.move", lock_key=["a", "b"], shared=False)
    def move(): ...

    run = server.run

    def fail_later(script, keys, *arguments):
        if server.names() and keys == ["dislock:{b}"]:
            raise StoreError("redis://fake", "away")
        return run(script, keys, *arguments)

    monkeypatch.setattr(server, "run", fail_later)
    assert dislock("pause", "--task", "shop.move").exit_code == AWAY
    assert ["paused lock 'a'" in one for one in caplog.messages] == [True]


@pytest.mark.parametrize(
    "command", ["pause export:*", "resume export:*", "limit export:* 2", "limit k 1000000001"]
)
def test_what_would_be_another_lock_or_a_damaged_one_is_refused(dislock, server, command):
    """A pattern is no key; a limit that no script could read would make the lock unusable."""
    answer = dislock(*command.split())
    assert answer.exit_code == USAGE
    assert "1000000001" in command or "looks like a pattern" in answer.stderr
    assert server.contents() == {}


def test_a_key_that_nobody_knows_is_a_warning(dislock, server):
    """It may be misspelt; it is paused all the same, as one that only looks like a pattern is."""
    answer = dislock("pause", "exprot:7")
    assert answer.exit_code == 0
    assert answer.stderr.startswith("Warning: nobody holds, awaits or reserves lock exprot:7 now.")
    for key in ("export:7", "export:*"):
        server.put(lock(key, waiting=1))
        answer = dislock("pause", key)
        assert (answer.exit_code, answer.stderr) == (0, "")
        assert server.overview.lock(f"dislock:{{{key}}}").limit == 0
