"""What is judged of workers, from what they answered."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import workers
from celery_dislock.operating.checks.facts import Fleet, Locks
from celery_dislock.operating.checks.table import findings, warning
from tests.unit.operating.checks.examples import described, facts


def found(ours=None, fleet=None, seen=None, **answers):
    """Check, level and text of what is found and is not ok."""
    known = facts(ours=ours or described(), fleet=fleet or Fleet(answers), locks=seen or Locks())
    all_of_it = [one for name, check in workers.CHECKS for one in findings(name, check, known)]
    return [(one.check, one.level, one.what) for one in all_of_it if one.level != "ok"]


OTHER = {"server": "redis://other/0"}
TIMEOUT = {"lock_key": "export:<n>", "lock_watchdog_timeout": 60.0}
LIMIT = {"lock_key": "export:<n>", "lock_limit": 3}
ALONE = {"no_server": "no such URL", "server": None, "prefix": None}


@pytest.mark.parametrize(
    ("answer", "check", "level", "text"),
    [
        (
            OTHER,
            "lock server",
            "serious",
            "may run twice at a time: export. Locks are at redis://h/",
        ),
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


@pytest.mark.parametrize(
    ("seen", "tasks", "level"),
    [
        (Locks(of_tasks=True), {}, "serious"),
        (Locks(leases=1), {"export": {}}, "serious"),
        (Locks(waiting=1), {"export": {}}, "serious"),
        (Locks(leases=1, waiting=1), {}, "warning"),  # plain Python needs no worker
        (Locks(), {"export": {}}, "warning"),
    ],
)
@pytest.mark.parametrize("error", ["", "Connection refused"])
def test_no_worker_is_serious_if_tasks_hold_locks_or_wait(seen, tasks, level, error):
    """They do not run, and nobody goes on with the lines."""
    told = found(described(tasks=tasks), Fleet({}, error), seen)
    assert [one[1] for one in told if one[0] == "workers"] == [level]


@pytest.mark.parametrize(
    ("error", "does"),
    [
        ("Command # 1 caused error: command not allowed when used memory > 'maxmemory'.", "full"),
        ("connection blocked, see broker logs", "alarms"),
        ("Authentication required.", "password"),
        ("invalid username-password pair or user is disabled.", "password"),
        ("(0, 0): (403) ACCESS_REFUSED - Login was refused using PLAIN", "password"),
        ("this user has no permissions to run the 'ping' command", "ACL SETUSER"),
        ("(0, 0): (403) ACCESS_REFUSED - configure access to queue refused", "set_permissions"),
        ("Connection.open: (530) NOT_ALLOWED - vhost x not found", "virtual host"),
        ("DB index is out of range", "database"),
        ("You can't write against a read only replica.", "master"),
        ("NOREPLICAS Not enough good replicas to write.", "replicas"),
        ("max number of clients reached", "connections"),
        ("Name or service not known", "host"),
        ("no answer to the TLS handshake; the port may be one without TLS", "broker_use_ssl"),
        ("Connection refused", "Start it"),
        ("no answer in time", "Start it"),
        ("something new", "log"),
    ],
)
def test_the_remedy_fits_what_the_broker_says(error, does):
    """A broker that answers and refuses is not to be started."""
    [one] = [f for f in workers.answers(facts(fleet=Fleet({}, error))) if f.level != "ok"]
    assert does in one.remedy
    assert ("Start it" in one.remedy) is (does == "Start it")


def test_different_servers_are_one_finding():
    """However many tasks, apps and workers there are; it names all of them."""
    tasks = {f"task-{number}": {} for number in range(30)}
    answers = {
        name: described(server=f"redis://{name}/0", tasks=tasks) for name in ("w1", "w2", "w3")
    }
    told = found(described(tasks=tasks, server="redis://here/0"), **answers)
    assert [one[:2] for one in told] == [("lock server", "serious")]
    for name in ("task-0", "and 25 others", "redis://w2/0, prefix dislock (w2)", "(this command)"):
        assert name in told[0][2]


def test_an_option_that_differs_for_many_tasks_is_one_finding():
    """It comes from one setting."""
    tasks = {f"task-{number}": {"lock_watchdog_timeout": 60.0} for number in range(30)}
    others: dict[str, dict[str, float]] = {name: {} for name in tasks}
    told = found(described(tasks=tasks), w1=described(tasks=tasks), w2=described(tasks=others))
    [(check, level, what)] = told
    assert (check, level) == ("options", "warning")
    assert "and 25 others differs: 60.0 (this command, w1); the default (w2)" in what


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
