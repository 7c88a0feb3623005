"""What ``pause``, ``resume`` and ``limit`` set, and what they say of it."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from celery_dislock.cli import limiting, session


@pytest.fixture
def limits(monkeypatch):
    """What was set; *before* is the answer."""

    class Limits:
        asked: ClassVar[list] = []
        before = None

        def limit(self, name, number, *, seconds, note):
            self.asked.append((name, number, seconds, note))
            return self.before

    Limits.asked.clear()
    monkeypatch.setattr(session.Session, "actions", Limits())
    monkeypatch.setattr(limiting.getpass, "getuser", lambda: "me")
    return Limits


@pytest.mark.parametrize(
    ("args", "asked", "said"),
    [
        (["pause", "k"], (0, None, "by me"), "Lock k is paused until: celery dislock resume k."),
        (
            ["pause", "k", "--for", "10m", "--note", "stop"],
            (0, 600.0, "by me: stop"),
            "Lock k is paused for 10 min.",
        ),
        (["limit", "k", "3"], (3, None, "by me"), "Lock k admits 3 at a time, until:"),
        (["resume", "k"], (None, None, ""), "Lock k has the limit of the code again."),
    ],
)
def test_what_is_set_is_said(dislock, limits, args, asked, said):
    """With who did it, and how to take it back."""
    answer = dislock(*args)
    assert answer.exit_code == 0
    assert limits.asked == [("dislock:{k}", *asked)]
    assert answer.stdout.startswith(said)


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

    monkeypatch.setattr(limiting.getpass, "getuser", nobody)
    dislock("pause", "k")
    assert limits.asked[0][-1] == "by an operator"
