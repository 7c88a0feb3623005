"""What is asked before a lease or a parked task is ended, and what is told after it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from celery_dislock.cli.session import Session
from celery_dislock.operating.actions import BrokerError
from tests.unit.cli.conftest import TASK_ID, holder, lock, place

FOUND, AWAY = 1, 3
FREED = ("free", "dislock:{k}", f"{TASK_ID}@celery@w1:7/1", 5)


def outcome(answer):
    return [one["outcome"] for one in json.loads(answer.stdout)]


def test_what_was_shown_is_freed(dislock, overview, actions):
    """By its owner and its token, after the answer yes."""
    overview.put(lock(holders=[holder()]))
    answer = dislock("free", "k", input="y\n")
    assert answer.exit_code == 0
    assert actions.done == [FREED]
    assert "held by shop.export[9b1d] on celery@w1 (pid 7)" in answer.stdout
    assert (
        "Freed lock k. Its holder learns of it within 10 s; until then two may run."
        in answer.stderr
    )


@pytest.mark.parametrize("given", ["n\n", "\n", ""])
def test_any_other_answer_changes_nothing(dislock, overview, actions, given):
    """No, nothing, or nobody there."""
    overview.put(lock(holders=[holder()]))
    answer = dislock("free", "k", input=given)
    assert answer.exit_code == FOUND
    assert actions.done == []
    assert "Nothing was changed." in answer.stderr


def test_what_has_ended_meanwhile_is_told(dislock, overview, actions):
    """The second of two operators."""
    overview.put(lock(holders=[holder()]))
    actions.gone = False
    answer = dislock("free", "k", "--yes", "--json")
    assert (answer.exit_code, outcome(answer)) == (FOUND, ["ended meanwhile"])


@pytest.mark.parametrize(
    ("changed", "asked", "told"),
    [
        ({}, "two may run at a time", "within 10 s"),
        ({"renewed": None}, "two may run at a time", "when it renews or releases"),
        ({"turn": True}, "goes to the end of the line", "Freed lock k.\n"),
        ({"expiring": True}, "to be held for longer", "Freed lock k.\n"),
    ],
)
def test_the_risk_is_told(dislock, overview, changed, asked, told):
    """Where a body goes on, two may run; where none does, something else is asked."""
    overview.put(lock(holders=[holder(**changed)]))
    answer = dislock("free", "k", input="y\n")
    assert asked in answer.stderr
    assert told in answer.stderr


def test_the_holder_is_terminated_first(dislock, overview, actions):
    """If its lease has ended by that, there is nothing to be freed."""
    overview.put(lock(holders=[holder()]))
    options = ["--terminate", "--signal", "KILL", "--wait", "5"]
    answer = dislock("free", "k", *options, "--json", input="y\n")
    assert (answer.exit_code, outcome(answer)) == (0, ["terminated"])
    assert "Terminate shop.export[9b1d] on celery@w1 (pid 7) and free the lock?" in answer.stderr
    assert actions.done == [("terminate", TASK_ID, "KILL"), ("wait", "dislock:{k}", 5.0)]


@pytest.mark.parametrize(
    ("left", "code", "result"),
    [
        ({"renewed": 3.0, "remaining": 27.0}, FOUND, "still runs"),
        ({"renewed": None, "remaining": 27.0}, FOUND, "still runs"),
        ({"renewed": 20.0, "remaining": 10.0}, 0, "freed"),
    ],
)
def test_one_that_is_still_there_is_freed_if_nobody_renews_it(
    dislock, overview, actions, left, code, result
):
    """A lease that is renewed, or that tells nothing, may have a process."""
    overview.put(lock(holders=[holder()]))
    actions.left = holder(**left)
    answer = dislock("free", "k", "--terminate", "--yes", "--json")
    assert (answer.exit_code, outcome(answer)) == (code, [result])
    assert (FREED in actions.done) == (result == "freed")


@pytest.mark.parametrize(
    ("changed", "done"),
    [
        ({"thread": "T", "task": None, "id": None}, []),
        ({"turn": True}, [FREED]),
        ({"expiring": True}, [FREED]),
    ],
)
def test_what_is_no_task_cannot_be_terminated(dislock, overview, actions, changed, done):
    """A thread keeps its lock; a turn, or a lease that only runs out, has no body."""
    overview.put(lock(holders=[holder(**changed)]))
    answer = dislock("free", "k", "--terminate", "--yes")
    assert "It cannot be terminated: " in answer.stderr
    assert actions.done == done


def test_a_broker_that_is_away_frees_nothing(dislock, overview, actions):
    """Exit code 3, as for the lock server."""
    overview.put(lock(holders=[holder()]))
    actions.error = BrokerError("refused")
    answer = dislock("free", "k", "--terminate", "--yes")
    assert answer.exit_code == AWAY
    assert answer.stderr.endswith("the broker did not take the command for the workers: refused\n")
    assert actions.done == []


def test_a_token_chooses_a_lease(dislock, overview, actions):
    """Of several; if there is none with that token, nothing is freed."""
    overview.put(lock(holders=[holder(), holder(owner="other", token=6)]))
    assert dislock("free", "k", "--token", "6", "--yes").exit_code == 0
    assert actions.done == [("free", "dislock:{k}", "other", 6)]
    answer = dislock("free", "k", "--token", "7", "--yes")
    assert answer.exit_code == FOUND
    assert "Nobody holds lock k with token 7." in answer.stderr


@pytest.fixture
def lines(monkeypatch):
    """The lines of a broker, of which the index names two locks."""
    server = SimpleNamespace(keeps_lines=True)
    index = SimpleNamespace(names=lambda: ["dislock:{j}", "dislock:{k}"])
    process = SimpleNamespace(store=SimpleNamespace(lock_server=server), lines=index)
    monkeypatch.setattr(Session, "process", process)
    return server


@pytest.mark.parametrize("wanted", ["t2", "t2:0:0"])
def test_a_parked_task_is_searched_in_all_lines(dislock, overview, actions, lines, wanted):
    """By its ticket or its id; what is dropped is shown before."""
    overview.put(lock("j", waiting=1, line=[place()]), lock("k", waiting=2, line=[place(2)]))
    answer = dislock("drop", wanted, input="y\n")
    assert answer.exit_code == 0
    assert actions.done == [("drop", "dislock:{k}", "t2:0:0")]
    assert "shop.export[t2], place 2 in line for lock k, parked for 5.0 s" in answer.stderr
    assert answer.stderr.endswith("Dropped.\n")


def test_a_key_names_the_line(dislock, overview, actions, lines):
    """Then no other line is read."""
    overview.put(lock("k", turns=[place(0)]))
    assert dislock("drop", "t0", "--key", "k", "--yes").exit_code == 0
    assert {name for name, *_ in overview.asked} == {"dislock:{k}"}


def test_what_has_left_the_line_is_told(dislock, overview, actions, lines):
    """Meanwhile, or before."""
    overview.put(lock("k", waiting=1, line=[place()]))
    actions.gone = False
    answer = dislock("drop", "t1", "--yes", "--json")
    assert answer.exit_code == FOUND
    assert json.loads(answer.stdout) == [{"key": "k", "ticket": "t1:0:0", "dropped": False}]
    answer = dislock("drop", "t9", "--yes")
    assert (answer.exit_code, answer.stderr) == (FOUND, "No parked task t9 is in line.\n")


def test_several_servers_keep_no_lines(dislock, lines):
    """That is said, and nothing is searched."""
    lines.keeps_lines = False
    assert "keep no parked tasks" in dislock("drop", "t1").stderr
