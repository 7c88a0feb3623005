"""What is asked before a lock is changed, what is done, and what is told after it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from celery_dislock import SingletonTask
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.cli import session
from celery_dislock.operating.locks import AppLocks
from celery_dislock.tasks.actions import BrokerError
from tests.unit.operating.cli.conftest import TASK_ID, holder, lock, place, reserved

FOUND, AWAY = 1, 3
WHO = "'shop.export[9b1d] on celery@w1 (pid 7)' (owner '9b1d@celery@w1:7/1', token 5)"
FREED = ("free", "dislock:{k}", f"{TASK_ID}@celery@w1:7/1", 5)


@pytest.fixture(autouse=True)
def _me(monkeypatch):
    monkeypatch.setattr(session.getpass, "getuser", lambda: "me")
    monkeypatch.setattr(session, "gethostname", lambda: "here")


def outcome(answer):
    return [one["outcome"] for one in json.loads(answer.stdout)]


def test_what_was_shown_is_freed(dislock, overview, actions, caplog):
    """By its owner and its token, after the answer yes; the log says who did it."""
    overview.put(lock(holders=[holder()]))
    answer = dislock("free", "k", input="y\n")
    assert answer.exit_code == 0
    assert actions.done == [FREED]
    assert "held by shop.export[9b1d] on celery@w1 (pid 7)" in answer.stdout
    assert (
        "Freed lock k. Its holder learns of it within 10 s; until then two may run."
        in answer.stderr
    )
    assert caplog.messages == [f"Command: 'me' on here freed lock 'k' of {WHO}."]


@pytest.mark.parametrize(
    ("given", "words"), [("n\n", ""), ("\n", ""), ("", "Nobody answers: give --yes")]
)
def test_any_other_answer_changes_nothing(dislock, overview, actions, given, words):
    """No, nothing, or nobody there."""
    overview.put(lock(holders=[holder()]))
    answer = dislock("free", "k", input=given)
    assert (answer.exit_code, actions.done) == (FOUND, [])
    assert words in answer.stderr
    assert "Left as it is." in answer.stderr


@pytest.mark.parametrize("there", [{"holders": [holder()]}, {"reservation": reserved()}])
def test_what_has_ended_meanwhile_is_told(dislock, overview, actions, there):
    """The second of two operators changes nothing: exit code 1."""
    overview.put(lock(**there))
    actions.answer = False
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
        ({"renewed": 3.0, "remaining": 27.0}, FOUND, ["still runs"]),
        ({"renewed": None, "remaining": 27.0}, FOUND, ["still runs"]),
        ({"renewed": 21.0, "remaining": 9.0}, 0, ["freed", "freed"]),
    ],
)
def test_one_that_is_still_there_is_freed_if_nobody_renews_it(
    dislock, overview, actions, caplog, left, code, result
):
    """A lease that is renewed, or tells nothing, may have a process: the reservation stays, too."""
    overview.put(lock(holders=[holder()], reservation=reserved()))
    actions.left = holder(**left)
    answer = dislock("free", "k", "--terminate", "--yes", "--json")
    assert (answer.exit_code, outcome(answer)) == (code, result)
    assert (FREED in actions.done) == (code == 0)
    told = f"Command: 'me' on here told the workers to end {WHO}, which holds lock 'k'."
    assert (caplog.messages[0], len(caplog.messages)) == (told, len(actions.done) - 1)


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
    """Of several; if there is none with that token, nothing is freed, no reservation either."""
    several = [holder(), holder(owner="other", token=6)]
    overview.put(lock(holders=several, reservation=reserved()))
    assert dislock("free", "k", "--token", "6", "--yes").exit_code == 0
    assert actions.done == [("free", "dislock:{k}", "other", 6)]
    answer = dislock("free", "k", "--token", "7", "--yes")
    assert (answer.exit_code, len(actions.done)) == (FOUND, 1)
    assert "Nobody holds lock k with token 7." in answer.stderr


UNRESERVED = ("unreserve", "dislock:{k}", "id-1", "5eed", 7)


def test_a_reservation_that_was_shown_is_ended(dislock, overview, actions, caplog):
    """Nobody holds the lock, and no message of its key would be sent."""
    overview.put(lock(reservation=reserved()))
    answer = dislock("free", "k", input="y\n")
    assert answer.exit_code == 0
    assert actions.done == [UNRESERVED]
    assert "reserved 3.0 s ago for task id-1, which is waiting" in answer.stdout
    assert "Ended the reservation of k." in answer.stderr
    assert "Nobody holds" not in answer.stderr
    done = "ended the reservation of lock 'k' for task 'id-1'"
    assert caplog.messages == [f"Command: 'me' on here {done}."]
    told = dislock("free", "k", "--yes", "--json").stdout
    assert json.loads(told) == [{"key": "k", "reserved_for": "id-1", "outcome": "freed"}]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("being sent", "Its message may still wait, and runs then as well."),
        ("waiting", "Its message may still wait, and runs then as well."),
        ("running", "Its task goes on."),
        ("ended", "Its task has ended."),
    ],
)
def test_what_the_end_of_a_reservation_means_is_told(dislock, overview, actions, state, words):
    """Before it is done; no leaves it."""
    overview.put(lock(reservation=reserved(state)))
    answer = dislock("free", "k", input="n\n")
    assert f"so that the next message is sent? {words}" in answer.stderr
    assert (answer.exit_code, actions.done) == (FOUND, [])


@pytest.mark.parametrize(
    ("given", "outcomes", "done", "code"),
    [
        ("n\ny\n", ["left", "freed"], [UNRESERVED], 0),
        ("y\nn\n", ["freed", "left"], [FREED], 0),
        ("n\nn\n", ["left", "left"], [], FOUND),
    ],
)
def test_lease_and_reservation_are_asked_for_one_by_one(
    dislock, overview, actions, given, outcomes, done, code
):
    """A task may run while its key is reserved for a message that was purged."""
    overview.put(lock(holders=[holder()], reservation=reserved()))
    answer = dislock("free", "k", "--json", input=given)
    assert (outcome(answer), actions.done, answer.exit_code) == (outcomes, done, code)


@pytest.mark.parametrize("command", [["free", "k"], ["drop", "t1"]])
@pytest.mark.parametrize("answer", ["n\n", "y\n"])
def test_what_was_not_changed_is_not_logged(
    dislock, overview, actions, lines, caplog, command, answer
):
    """Somebody said no, or it had ended already."""
    overview.put(lock(holders=[holder()], reservation=reserved(), waiting=1, line=[place()]))
    actions.answer = False
    dislock(*command, input=answer * 2)
    assert caplog.messages == []


@pytest.fixture
def lines(monkeypatch):
    """The lines of a broker, of which the index names two locks."""
    server = SimpleNamespace(keeps_lines=True)
    index = SimpleNamespace(names=lambda: ["dislock:{j}", "dislock:{k}"])
    process = SimpleNamespace(store=SimpleNamespace(lock_server=server), lines=index)
    monkeypatch.setattr(AppLocks, "process", process)
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


def test_a_damaged_line_costs_no_other_its_search(dislock, overview, actions, lines):
    """It is named; with its key it is an error."""
    overview.put(lock("k", waiting=2, line=[place(2)]))
    overview.known["dislock:{j}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{j}")
    answer = dislock("drop", "t2", "--yes")
    assert (answer.exit_code, actions.done) == (0, [("drop", "dislock:{k}", "t2:0:0")])
    assert "Not looked into: lock server redis://fake: 'dislock:{j}'" in answer.stderr
    assert dislock("drop", "t2", "--key", "j", "--yes").exit_code == FOUND


def test_what_has_left_the_line_is_told(dislock, overview, actions, lines):
    """Meanwhile, or before."""
    overview.put(lock("k", waiting=1, line=[place()]))
    actions.answer = False
    answer = dislock("drop", "t1", "--yes", "--json")
    assert answer.exit_code == FOUND
    assert json.loads(answer.stdout) == [{"key": "k", "ticket": "t1:0:0", "dropped": False}]
    answer = dislock("drop", "t9", "--yes")
    assert (answer.exit_code, answer.stderr) == (FOUND, "No parked task t9 is in line.\n")


def test_several_servers_keep_no_lines(dislock, lines):
    """That is said, and nothing is searched."""
    lines.keeps_lines = False
    assert "keep no parked tasks" in dislock("drop", "t1").stderr


def test_what_was_set_aside_is_put_back(dislock, actions):
    """Each ticket says what became of it; a finding if nothing was sent."""
    actions.aside = [("t1:0:0", ""), ("t2:0:0", "its message is lost: x")]
    answer = dislock("put-back", "k", "--ticket", "t")
    assert actions.done == [("put back", "dislock:{k}", "t")]
    assert answer.exit_code == 0
    assert answer.stdout == "t1:0:0: put back\nt2:0:0: its message is lost: x\n"
    actions.aside = actions.aside[1:]
    answer = dislock("put-back", "k", "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout) == [{"ticket": "t2:0:0", "problem": "its message is lost: x"}]
    actions.aside = []
    answer = dislock("put-back", "k")
    assert (answer.exit_code, answer.stderr) == (1, "Nothing is set aside there.\n")


# How many a lock admits.


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
def test_what_is_set_is_said(dislock, actions, caplog, args, asked, said, logged):
    """With who did it, and how to take it back; in the log, too."""
    answer = dislock(*args)
    assert answer.exit_code == 0
    assert actions.done == [("limit", "dislock:{k}", *asked)]
    assert answer.stdout.startswith(said)
    assert logged in caplog.text


def test_what_was_set_before_is_said(dislock, actions):
    """In words, and as JSON."""
    actions.before = 0
    assert dislock("limit", "k", "2").stdout.endswith("It was paused.\n")
    actions.before = 5
    (told,) = json.loads(dislock("resume", "k", "--json").stdout)
    assert (told["key"], told["limit"], told["before"]) == ("k", None, 5)


def test_a_user_without_a_name(dislock, actions, monkeypatch):
    """As in some containers."""

    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(session.getpass, "getuser", nobody)
    dislock("pause", "k")
    assert actions.done[0][-1] == "by an operator"


def test_what_was_set_before_an_error_is_logged(dislock, actions, caplog, monkeypatch):
    """Of several keys the first is paused, and the lock server goes away."""
    about = {"name": "shop.move", "lock_key": ["a", "b"], "shared": False}
    dislock.app.task(base=SingletonTask, **about)(nothing)

    def fail_later(name, *_args, **_options):
        if name == "dislock:{b}":
            raise StoreError("redis://fake", "away")

    monkeypatch.setattr(actions, "limit", fail_later)
    assert dislock("pause", "--task", "shop.move").exit_code == session.AWAY
    assert ["paused lock 'a'" in one for one in caplog.messages] == [True]


def nothing(): ...


@pytest.mark.parametrize("command", [["pause"], ["resume"], ["limit", "2"]])
def test_a_pattern_is_refused(dislock, actions, command):
    """It would be taken for a key that nobody has, and nothing would be paused."""
    name, *number = command
    answer = dislock(name, "export:*", *number)
    assert answer.exit_code == 2
    assert "looks like a pattern" in answer.stderr
    assert actions.done == []


def test_a_limit_that_no_script_could_read_is_refused(dislock, actions):
    """It would make the lock unusable, until somebody deletes the record of its limit."""
    assert dislock("limit", "k", "1000000001").exit_code == 2
    assert actions.done == []


def test_a_key_that_only_looks_like_a_pattern_can_be_paused(dislock, actions, overview):
    """A value of an argument may have a star in it."""
    overview.put(lock("export:*", waiting=1))
    assert dislock("pause", "export:*").exit_code == 0
    assert len(actions.done) == 1


def test_a_key_that_nobody_knows_is_a_warning(dislock, actions, overview):
    """It may be misspelt; it is paused all the same, as it may be there soon."""
    answer = dislock("pause", "exprot:7", "--json")
    assert answer.exit_code == 0
    assert answer.stderr.startswith("Warning: nobody holds, awaits or reserves lock exprot:7 now.")
    assert json.loads(answer.stdout)[0]["limit"] == 0
    overview.put(lock("export:7", waiting=1))
    assert dislock("pause", "export:7").stderr == ""
