"""``pause``, ``limit`` and ``resume``: what is set, told and logged."""

from pathlib import Path

import pytest

from celery_dislock import SingletonTask
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli import session
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.overrides import RateState
from celery_dislock.tasks.handle import LockHandle
from tests.commands import AWAY, USAGE
from tests.staged import holder, lock

RATE = RateState(Rate(20, 60.0), 0.0, is_set=True, note="by ana")
TEXTS = Path(__file__).parent / "texts"
AS_CODE = "Lock k has the limit and rate of the code again."
BACK = "let lock 'k' be taken as often as the code says"


def told(state):
    """What people have set: limit, rate, for how long, and why."""
    rate = state.rate
    known = [state.limit, rate and rate.is_set and str(rate.rate)]
    back = [rate.back_note] if rate and rate.held_back else []
    return [*known, state.limit_remaining, state.limit_note, rate and rate.note, *back]


@pytest.mark.parametrize(
    "known", [{"ticked": 9.0}, {"holders": [holder(task=None, id=None, thread="beat")]}]
)
def test_of_a_beat_it_is_told_that_a_pause_stops_it(dislock, server, known):
    """Whoever leads sends nothing more, other than a task, which keeps its lock."""
    server.put(lock("beat", **known))
    assert dislock("pause", "beat").stdout == (
        "Lock beat is paused until: celery dislock resume beat. The beat that leads by it sends "
        "nothing more, and the others nothing, either.\n"
    )
    assert dislock("limit", "beat", "1").stdout == (
        "Lock beat admits 1 at a time, until: celery dislock resume beat. It was paused.\n"
    )


@pytest.mark.parametrize("session", (TEXTS / "limits.txt").read_text("utf-8").split("\n\n"))
def test_what_is_set_is_said(dislock, server, caplog, session):
    """With who did it, how to take it back and what was set before; in the log, too."""
    command, *expected = session.splitlines()
    server.put(lock(limit=5, rate=RATE))
    answer = dislock(*command.removeprefix("$ celery dislock ").split())
    assert (answer.exit_code, answer.stderr) == (0, "")
    logged = [one.replace("Command: 'me' on here ", "log: ")[:-1] for one in caplog.messages]
    kept = ", ".join(map(str, told(server.overview.lock("dislock:{k}"))))
    assert [*answer.stdout.splitlines(), *logged, f"set: {kept}"] == expected


def test_a_rate_lasts_as_long_as_it_is_set_for(dislock, server):
    """As a limit does; then what the code says holds again."""
    server.put(lock(waiting=1))
    dislock("limit", "k", "--rate", "5/m", "--for", "10m")
    assert server.overview.lock("dislock:{k}").rate.remaining == 600.0
    server.advance(601)
    assert server.overview.lock("dislock:{k}").rate is None


def hold_back(app, seconds):
    LockHandle(["k"], runtime_of(app), app).hold_back(seconds)


def test_programs_are_told_what_was_set(dislock, server, caplog):
    """By field, with what somebody had set before."""
    server.put(lock(limit=0, waiting=1))
    assert "paused" in dislock("limit", "k", "2").stdout
    rate = {"most": 5, "window": 60.0}
    first = {"key": "k", "rate": rate, "rate_before": None, "seconds": 60.0}
    assert dislock.json("limit", "k", "--rate", "5/m", "--for", "60") == [first]
    hold_back(dislock.app, 9)  # as a task does after an answer 429
    (told,) = dislock.json("resume", "k")
    assert told.pop("held_back_before") == pytest.approx(9.0, abs=0.1)
    before = {"limit": None, "before": 2, "rate": None, "rate_before": rate}
    assert told == {"key": "k", **before, "seconds": None}
    (told,) = dislock.json("resume", "k")
    assert told == {"key": "k", "limit": None, "before": None, "seconds": None}
    assert dislock("resume", "k").stdout == f"{AS_CODE} Nobody had set another.\n"
    hold_back(dislock.app, 90)
    assert "It is held back for 90 s more." in dislock("limit", "k", "3").stdout
    assert dislock("resume", "k").stdout == f"{AS_CODE} It admitted 3. It was held back.\n"
    assert caplog.messages[-1] == f"Command: 'me' on here {BACK}."
    assert server.overview.lock("dislock:{k}").rate is None


@pytest.mark.parametrize("command", ["limit k 1 --rate 9/m", "limit k --rate 9/m"])
def test_several_servers_count_no_starts(dislock, server, command):
    """That is said, and nothing is set by halves; what they can have is taken back."""
    server.keeps_lines, server.kind = False, "quorum"
    answer = dislock(*command.split())
    assert answer.exit_code == USAGE
    assert "several lock servers" in answer.stderr
    assert server.contents() == {}
    server.put(lock(limit=0))
    assert dislock("resume", "k").exit_code == 0
    assert server.contents() == {}


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
