"""What is judged of workers, from what they answered."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import workers
from celery_dislock.operating.checks.facts import Fleet
from celery_dislock.operating.checks.table import findings, warning
from tests.unit.operating.checks.examples import described, facts


def found(ours=None, fleet=None, **answers):
    """Check, level and text of what is found and is not ok."""
    known = facts(ours=ours or described(), fleet=fleet or Fleet(answers))
    all_of_it = [one for name, check in workers.CHECKS for one in findings(name, check, known)]
    return [(one.check, one.level, one.what) for one in all_of_it if one.level != "ok"]


OTHER = {"server": "redis://other/0"}
TIMEOUT = {"lock_key": "export:<n>", "lock_watchdog_timeout": 60.0}
LIMIT = {"lock_key": "export:<n>", "lock_limit": 3}
ALONE = {"no_server": "no such URL", "server": None, "prefix": None}


@pytest.mark.parametrize(
    ("answer", "check", "level", "text"),
    [
        (OTHER, "lock server", "serious", "Workers lock export on different servers"),
        ({"prefix": "staging"}, "lock server", "serious", "redis://h/0, prefix staging (w2)"),
        (ALONE, "lock server", "serious", "no lock server: w2 (no such URL)"),
        ({"locks": False}, "tasks", "serious", "(--no-dislock), also if others lock them: w2."),
        (
            {"tasks": {"export": {"lock_key": "export:<corp>"}}},
            "options",
            "serious",
            "lock_key of export differs, so it may run twice at a time: export:<corp> (w2)",
        ),
        ({"tasks": {"export": LIMIT}}, "options", "serious", "the default (this command, w1)"),
        ({"tasks": {"export": TIMEOUT}}, "options", "warning", "lock_watchdog_timeout of export"),
        ({"warnings": ["It does X: a.b. Raise it."]}, "tasks", "warning", "w2 started: It does X"),
        ({"errors": 1}, "renewals", "warning", "unexpected errors: w2"),
        (
            {"lease": {"overdue": True}},
            "renewals",
            "warning",
            "two renewals in a row: w2 (export:7)",
        ),
        ({"unavailable": "no route"}, "renewals", "serious", "these workers: w2 (no route)"),
    ],
)
def test_a_worker_that_differs_from_another(answer, check, level, text):
    """It is named; a difference is serious if a task may run twice because of it."""
    told = [one for one in found(w1=described(), w2=described(**answer)) if one[0] == check]
    assert level in [is_ for _, is_, what in told if text in what]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {**OTHER, "tasks": {"report": {}}},  # two projects share a broker
        {**ALONE, "tasks": {}, "enabled": None},  # it locks nothing, and has the plugin
        {"warnings": ["The lock server may evict locks. Set it."]},  # that is looked at from here
    ],
)
def test_a_worker_that_need_not_agree(answer):
    """It is as healthy as one that does."""
    assert found(w1=described(), w2=described(**answer)) == []


def test_a_worker_that_locks_elsewhere_than_this_command_looks():
    """What the command finds of locks is then not about that worker."""
    [(check, level, what)] = found(w1=described(**OTHER))
    assert (check, level) == ("lock server", "warning")
    assert "redis://h/0, prefix dislock" in what
    assert "redis://other/0, prefix dislock" in what


@pytest.mark.parametrize(
    ("fleet", "text"),
    [
        (Fleet({}, "Connection refused"), "Connection refused"),
        (Fleet({}), "No worker answers"),
        (Fleet({"w1": described(), "w2": None}), "did not answer in time: w2."),
    ],
)
def test_workers_that_do_not_answer_as_they_should(fleet, text):
    """It is a warning: that may be wrong, or not."""
    [(check, level, what)] = found(fleet=fleet)
    assert (check, level, text in what) == ("workers", "warning", True)


def test_a_key_that_only_this_command_has_is_a_warning():
    """The workers agree, and are what counts."""
    ours = described(tasks={"export": {"lock_key": "new:<n>"}})
    [(check, level, _)] = found(ours, w1=described(), w2=described())
    assert (check, level) == ("options", "warning")


def test_no_task_has_a_lock():
    """Then there is nothing to examine."""
    [(check, level, _)] = found(described(tasks={}), w1=described(tasks={}))
    assert (check, level) == ("tasks", "note")


def test_warnings_of_the_start_are_repeated_once():
    """With all workers that logged them, and what to do."""
    answers = {name: described(warnings=["These do X: a.b. Raise it."]) for name in ("w1", "w2")}
    [one] = [one for one in workers.tasks(facts(fleet=Fleet(answers))) if one.level != "ok"]
    assert (one.what, one.remedy) == ("When w1, w2 started: These do X: a.b.", "Raise it.")


def test_a_check_that_cannot_go_on_says_so_and_ends_no_other():
    """Its findings have its name; an answer that nobody expects ends no examination either."""
    for error in (StoreError("redis://h", "no answer in time"), KeyError("version")):

        def lines(_, error=error):
            yield warning("A line.")
            raise error

        first, last = findings("lines", lines, facts())
        assert (first.check, first.level, first.what) == ("lines", "warning", "A line.")
        assert (last.check, last.level) == ("lines", "note")
        assert "could not be looked at" in last.what
