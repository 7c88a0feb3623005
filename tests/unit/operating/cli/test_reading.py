"""Who holds what, in words and as JSON."""

from __future__ import annotations

import json

import pytest

from celery_dislock import SingletonTask
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.names import reserved_lock
from tests.unit.operating.cli.conftest import HELD, holder, lock, place, reserved

FOUND = 1


def nothing(): ...


def rows(answer):
    """Return the keys of a table, in order."""
    return [row.split()[0] for row in answer.stdout.splitlines()[1:]]


def test_all_that_is_known_has_a_row(dislock, overview):
    """What is in trouble on top, then by key; a row for each lock, none for an unknown one."""
    overview.put(
        lock("e"),
        lock("d", limit=0, limit_age=7200.0),
        lock("c", reservation=reserved()),
        lock("b", holders=[holder(held=5.0, who="other"), holder()], limit=3),
        lock("a", waiting=2),
    )
    answer = dislock("ls", "x*")
    assert overview.patterns == ["x*"]
    assert rows(answer) == ["a", "d", "b", "c"]
    assert answer.stdout.splitlines()[3:] == [
        "b    -                  12 min    -        3      2 leases: shop.export[9b1d] ..",
        "c    -                  -         -        -      nobody; reserved for id-1, w..",
    ]
    assert [one["key"] for one in json.loads(dislock("ls", "--json").stdout)] == list("adbc")


def test_what_is_in_trouble_says_so(dislock, overview):
    """The worst first, with since when; and `show` says what it is, and what to do."""
    overview.put(
        lock("a", holders=[holder()]),
        lock("b", limit=0, limit_age=7200.0, waiting=2),
        lock("c", aside=1),
        lock("d", waiting=2),
        lock("e", holders=[holder(), holder(renewed=25.0, remaining=5.0)], aside=1),
    )
    overview.known["dislock:{f}"] = DamagedLockError("redis://f", "wrong type", "dislock:{f}")
    answer = dislock("ls")
    assert rows(answer) == list("fedcba")
    for row, trouble in zip(
        answer.stdout.splitlines()[1:],
        ("damaged", "overdue 25 s, set aside", "stuck", "set aside", "paused 2 h 00 min", "-"),
        strict=True,
    ):
        assert f"  {trouble}  " in row
    told = json.loads(dislock("ls", "--json").stdout)
    assert [one.get("troubles") for one in told[1:3]] == [["overdue", "set aside"], ["stuck"]]
    assert json.loads(dislock("show", "e", "--json").stdout)["troubles"] == told[1]["troubles"]
    shown = dislock("show", "e").stdout
    assert "  overdue: Leases that missed two renewals" in shown
    assert (
        "  set aside: Parked tasks that could not be read or run were set aside: 1 task. " in shown
    )


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ([], ["a", "b"]),
        (["--held-for", f"{HELD:g}"], ["a"]),
        (["--held-for", "1h"], []),
        (["--task", "shop.mail"], ["b"]),
        (["--task", "shop.*"], ["a", "b"]),
        (["--worker", "celery@w2"], ["b"]),
    ],
)
def test_holders_are_chosen(dislock, overview, options, keys):
    """By how long, which task, and where; the limits belong to it."""
    overview.put(
        lock("a", holders=[holder()]),
        lock("b", holders=[holder(held=HELD - 1, task="shop.mail", worker="celery@w2")]),
    )
    answer = dislock("ls", *options)
    assert rows(answer) == keys
    assert answer.stderr == ("" if keys else "No lock matches.\n")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "renewed 3.0 s ago, ends in 27 s unless renewed again"),
        ({"renewed": None}, "lease     ends in 27 s\n"),
        ({"expiring": True}, "its owner is done; ends in 27 s"),
        ({"turn": True}, "a turn that is not claimed yet; ends in 27 s"),
        ({"mode": "shared"}, "mode      shared"),
        ({"thread": "MainThread", "task": None, "id": None}, "thread    MainThread"),
    ],
)
def test_a_lease_in_words(dislock, overview, changed, words):
    """What the times of a lease mean depends on its kind."""
    overview.put(lock(holders=[holder(**changed)]))
    assert words in dislock("show", "k").stdout


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"waiting": 3, "line": [place()]}, "... celery dislock line k --first 2"),
        ({"turns": [place(0, turns=2)]}, "has its turn: shop.export[t0] (turn 2,"),
        ({"aside": 2}, "2 set aside, because nobody could read or run them: dislock:{k}:aside"),
        (
            {"limit": 0, "limit_remaining": 60.0, "limit_since": 86400.0, "limit_note": "by me"},
            "paused for 60 s more, by me, since 1970-01-0",
        ),
        ({"limit": 3}, "limited to 3 at a time until it is resumed"),
        (
            {"limit_differs": 1},
            "while all of them answer, or take it back: celery dislock resume k\n",
        ),
        (
            {"reservation": reserved()},
            "reserved 3.0 s ago for task id-1, which is waiting; ends in 60 s unless renewed\n",
        ),
        (
            {"reservation": reserved("ended")},
            "stays reserved for task id-1, which ended 3.0 s ago; ends in 60 s\n",
        ),
    ],
)
def test_what_belongs_to_a_lock(dislock, overview, changed, words):
    """All that is known is shown, also if nobody holds it."""
    overview.put(lock(**changed))
    answer = dislock("show", "k")
    assert answer.exit_code == 0
    assert "held by nobody" in answer.stdout
    assert words in answer.stdout


def test_beats_lead_and_stand_by(dislock, overview):
    """What is shown of them is true: a beat that stands by asks anew every few seconds."""
    beat = {"task": None, "id": None, "host": None, "thread": "beat", "worker": "h"}
    waits = place(parked=False, task=None, id=None, thread="beat", who="beat on h2 (pid 8)")
    leads = holder(**beat, who="beat on h (pid 7)")
    overview.put(lock(holders=[leads], ticked=90.0, waiting=1, line=[waits]))
    shown = dislock("show", "k").stdout
    assert "led by beat on h (pid 7)\n    process   7 on h\n    leads for " in shown
    assert "last tick 90 s ago" in shown
    assert "    1. beat on h2 (pid 8) stands by\n" in shown
    assert dislock("line", "k").stdout.splitlines()[1].split()[:2] == ["1", "-"]
    overview.put(lock(ticked=90.0))
    assert "  led by nobody\n  last tick 90 s ago\n" in dislock("show", "k").stdout


def test_keys_that_are_reserved_together(dislock, overview):
    """A task with several keys reserves all of them under one name, which is shown, too."""
    about = {"name": "shop.move", "lock_key": ["a", "b"], "shared": False}
    dislock.app.task(base=SingletonTask, **about)(nothing)
    names = ["dislock:{a}", "dislock:{b}"]
    assert dislock("show", "--task", "shop.move").exit_code == FOUND
    together = lock("a and others", name=reserved_lock(names), reservation=reserved())
    overview.put(together)
    answer = dislock("show", "--task", "shop.move")
    assert answer.exit_code == 0
    assert "lock a and others\n  held by nobody\n  reserved 3.0 s ago" in answer.stdout
    told = json.loads(dislock("show", "--task", "shop.move", "--json").stdout)
    assert [one["key"] for one in told] == ["a", "b", "a and others"]


def test_a_page_of_a_line(dislock, overview):
    """Places are counted from 1 on the command line, and what is long is cut."""
    line = [place(number, args="x" * 99) for number in (1, 2, 3)]
    overview.put(lock(waiting=9, line=[*line, place(4, parked=False, ticket="")]))
    answer = dislock("line", "k", "--first", "3", "--most", "2")
    assert overview.asked == [("dislock:{k}", 2, 2)]
    assert rows(answer) == ["3", "4"]
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert "xx..\n" in answer.stdout
    assert answer.stderr == "9 in line; go on with --first 5\n"


def test_nobody_in_line_is_a_finding(dislock):
    """Also for JSON."""
    assert dislock("line", "k").exit_code == FOUND
    answer = dislock("line", "k", "--json")
    assert json.loads(answer.stdout) == {"key": "k", "waiting": 0, "turns": [], "line": []}
