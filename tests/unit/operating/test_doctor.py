"""``doctor``: what it finds wrong with workers, and how it says it."""

import re
from functools import partial
from threading import Event

import pytest
from celery import Celery

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.table import warning
from celery_dislock.operating.cli import doctor as command
from celery_dislock.operating.cli.doctor import ask_fleet, findings
from celery_dislock.operating.site import ANSWERS_WITHIN
from tests.staged import holder, lock, place
from tests.unit.operating.examining import EXPORT, told_in

TIMEOUT = {**EXPORT, "lock_watchdog_timeout": 60.0}
NOWHERE = {"no_server": "no such URL", "server": None, "prefix": None}
OTHER = {"server": "redis://other/0"}
TOLD = told_in("doctor-workers.txt")


DIFFERS = {
    "another server": OTHER,
    "another prefix": {"prefix": "staging"},
    "no server": NOWHERE,
    "no locks": {"locks": False},
    "another key": {"tasks": {"export": {"lock_key": "export:<corp>"}}},
    "another limit": {"tasks": {"export": {**EXPORT, "lock_limit": 3}}},
    "another rate": {"tasks": {"export": {**EXPORT, "lock_rate": "9 a minute"}}},
    "another cost": {"tasks": {"export": {**EXPORT, "lock_cost": "<n>"}}},
    "another timeout": {"tasks": {"export": TIMEOUT}},
    "its own warning": {"warnings": ["It does X: a.b. Raise it."]},
    "errors": {"errors": 1},
    "overdue": {"lease": {"overdue": True}},
    "missed": {"lease": {"missed": True, "id": "9"}},
    "no route": {"unavailable": "no route"},
    "an odd answer": {"tasks": 7},
    "an error": {"error": "KeyError", "leases": None},
}
IS_NO_MATTER = {
    "the same": {},
    "two projects share a broker": {**OTHER, "tasks": {"report": {}}},
    "it locks nothing": {**NOWHERE, "tasks": {}, "enabled": None},
    "what doctor finds itself": {"warnings": ["The lock server may evict locks. Set it."]},
}


@pytest.mark.parametrize("case", [*DIFFERS, *IS_NO_MATTER])
def test_a_worker_beside_another(doctor, case):
    """One that differs is named; a difference is serious if a task may run twice because of it."""
    doctor.declare(**EXPORT)
    doctor.answers["w2"] = doctor.described(**{**DIFFERS, **IS_NO_MATTER}[case])
    found = [" ".join(one) for one in doctor.found()]
    assert found == ([] if case in IS_NO_MATTER else TOLD[case])


def test_a_workers_own_warning_is_split_into_what_is_so_and_the_remedy(doctor):
    """One that says no remedy has none."""
    doctor.declare(**EXPORT)
    doctor.answers["w2"] = doctor.described(warnings=["It does X: a.b. Raise it.", "It is old."])
    told = {(one["what"], one["remedy"]) for one in doctor.told() if one["check"] == "tasks"}
    assert ("When w2 started: It does X: a.b.", "Raise it.") in told
    assert ("When w2 started: It is old.", "") in told


def test_a_worker_that_locks_elsewhere_than_this_command_looks(doctor):
    """What the command finds of locks is then not about that worker."""
    doctor.answers = {"w1": doctor.described(**OTHER)}
    [(_, level, what)] = doctor.found("lock server")
    assert level == "warning"
    assert f"{doctor.at.name}, prefix dislock" in what
    assert "redis://other/0, prefix dislock" in what


@pytest.mark.parametrize(
    ("there", "declared", "level"),
    [
        ({"holders": [holder()]}, False, "serious"),
        ({"holders": [holder(task=None, id=None, thread="T")]}, True, "serious"),
        ({"waiting": 1, "line": [place(parked=False, task=None, thread="T")]}, True, "serious"),
        ({"holders": [holder(task=None, id=None, thread="T")]}, False, "warning"),  # plain Python
        ({}, True, "warning"),
    ],
)
@pytest.mark.parametrize("error", [None, ConnectionRefusedError(111, "Connection refused")])
def test_no_worker_is_serious_if_tasks_hold_locks_or_wait(
    doctor, server, there, declared, level, error
):
    """They do not run, and nobody goes on with the lines."""
    if declared:
        doctor.declare(**EXPORT)
    doctor.answers, doctor.error = {}, error
    server.put(lock(**there))
    [(_, is_, what)] = doctor.found("workers")
    assert is_ == level
    assert ("Connection refused" if error else "No worker answers") in what


REMEDIES = told_in("broker-errors.txt")


@pytest.mark.parametrize("error", REMEDIES)
def test_the_remedy_fits_what_the_broker_says(doctor, error):
    """A broker that answers and refuses is not to be started."""
    doctor.error = RuntimeError(error)
    assert [one["remedy"] for one in doctor.told() if one["check"] == "workers"] == REMEDIES[error]


def test_what_comes_from_one_setting_is_one_finding(doctor):
    """However many tasks, apps and workers there are; it names all of them."""
    tasks = {f"task-{number}": EXPORT for number in range(30)}
    for name in tasks:
        doctor.declare(name, **EXPORT)
    doctor.answers = {
        name: doctor.described(server=f"redis://{name}/0", tasks=tasks) for name in ("w1", "w2")
    }
    [(check, level, what)] = doctor.found()
    assert (check, level) == ("lock server", "serious")
    for words in ("task-0", "and 25 others", "redis://w2/0, prefix dislock (w2)", "(this command)"):
        assert words in what
    others = dict.fromkeys(tasks, TIMEOUT)
    doctor.answers = {"w1": doctor.described(tasks=others), "w2": doctor.described(tasks=tasks)}
    [(check, level, what)] = doctor.found()
    assert (check, level) == ("options", "warning")
    assert "and 25 others differs: 60.0 (w1); the default (this command, w2)" in what


def test_what_only_this_command_has_is_a_warning_and_no_task_a_note(doctor):
    """The workers agree, and are what counts; without a task there is nothing to examine."""
    doctor.answers = {"w1": doctor.described(tasks={})}
    assert [one[:2] for one in doctor.found()] == [("tasks", "note")]
    doctor.declare(lock_key="new:<n>")
    doctor.answers = {name: doctor.described() for name in ("w1", "w2")}
    assert [one[:2] for one in doctor.found()] == [("options", "warning")]


def test_a_broker_is_not_waited_for_for_ever(app, monkeypatch):
    """Kombu sets no time limits; those that the app sets stay; RabbitMQ says that it blocks."""
    away = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    away.conf.broker_transport_options = given = {"socket_timeout": 77, "visibility_timeout": 5}
    assert ask_fleet(away, 1.0).error
    limits = {**given, "socket_connect_timeout": ANSWERS_WITHIN}
    assert away.conf.broker_transport_options == limits
    away.close()
    monkeypatch.setattr(command, "ANSWERS_WITHIN", 0.0)
    goes_on = Event()

    def wait(says, _app, _timeout, blocked):
        blocked += says
        goes_on.wait(60)

    for says in ([], ["connection blocked, see broker logs"]):
        monkeypatch.setattr(command, "_ask", partial(wait, says))
        assert ask_fleet(app, 0.05).error == (says or ["no answer in time"])[0]
    goes_on.set()


# What it writes.


def test_a_check_that_cannot_go_on_says_so_and_ends_no_other():
    """Its findings have its name; an answer that nobody expects ends no examination either."""
    for error in (StoreError("redis://h", "no answer in time"), KeyError("version")):

        def lines(_, error=error):
            yield warning("A line.")
            raise error

        first, last = findings("lines", lines, None)
        assert (first.check, first.level, first.what) == ("lines", "warning", "A line.")
        assert (last.check, last.level) == ("lines", "note")
        assert "could not be looked at" in last.what


def test_long_findings_are_wrapped(doctor, dislock, server):
    """Each line is readable in a terminal, the worst first, and a key is no command to it."""
    doctor.declare(**EXPORT)
    server.put(lock("\x1b[31mred", aside=1))
    lines = dislock("doctor", "--timeout", "0.01", env={"COLUMNS": "60"}).stdout.splitlines()
    assert lines[:6] == [
        "warning  set aside: Parked tasks that could not be read or",
        "         run were set aside: \\x1b[31mred (1 task).",
        "         -> When a worker can run them: celery dislock",
        "            put-back KEY. See the page Operate it, Tasks",
        "            that were set aside.",
        lines[5],
    ]
    assert re.fullmatch(r"1 warning, \d+ ok", lines[-1])
