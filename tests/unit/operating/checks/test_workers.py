"""What is judged of workers, from what they told."""

from __future__ import annotations

import json

import pytest

from celery_dislock.operating.checks import workers
from celery_dislock.operating.checks.workers import Fleet, understood

PLACE = {"server": "redis://h/0", "prefix": "dislock", "no_server": None}


def told(**given):
    """What a worker tells, of which a test changes a part."""
    processes = [{"pid": 7, "unchanged_for": 0.0, "held": 1, "errors": 0, "worst_late": 0.0}]
    return {
        "version": "1",
        "enabled": True,
        "locks": True,
        **PLACE,
        "tasks": {"export": {"lock_key": "export:<n>"}},
        "warnings": [],
        "processes": [{**processes[0], "outages": 0, **given.pop("process", {})}],
        **given,
    }


OURS = {name: value for name, value in told().items() if name not in {"warnings", "processes"}}


def found(ours=OURS, **fleet):
    """Level and text of what is found and is not ok."""
    findings = workers.about(ours, Fleet(fleet, {}))
    return [(one.check, one.level, one.what) for one in findings if one.level != "ok"]


def test_workers_that_agree_are_fine():
    """The app here has the same options, too."""
    assert found(w1=told(), w2=told()) == []


def test_a_broker_that_is_away():
    """Nothing else is said of workers."""
    [one] = workers.about(OURS, Fleet({}, {}, "Connection refused"))
    assert (one.check, one.level) == ("workers", "warning")
    assert "Connection refused" in one.what


def test_no_worker_answers():
    """That may be wrong, or not."""
    assert [(check, level) for check, level, _ in found()] == [("workers", "warning")]


def test_workers_without_the_command_are_named():
    """They cannot be compared."""
    [(_, level, what)] = found(w1=told(), w2=None)
    assert (level, "did not answer in time: w2." in what) == ("warning", True)


def test_workers_that_lock_elsewhere_than_this_command_looks():
    """What it tells of locks is then not about them."""
    [(check, level, what)] = found(w1=told(server="redis://other/0"))
    assert (check, level) == ("lock server", "warning")
    assert "redis://h/0, prefix dislock" in what
    assert "redis://other/0, prefix dislock" in what


def test_workers_that_lock_the_same_task_on_different_servers():
    """It may run twice at a time."""
    findings = found(w1=told(), w2=told(server="redis://other/0"))
    assert [level for check, level, _ in findings if check == "lock server"] == ["serious"]


def test_workers_of_other_tasks_may_have_another_server():
    """Two projects share a broker."""
    other = told(server="redis://other/0", tasks={"report": {}})
    assert found(w1=told(), w2=other) == []


def test_prefixes_count_as_servers_do():
    """They are other locks."""
    findings = found(w1=told(), w2=told(prefix="staging"))
    assert ("lock server", "serious") in [(check, level) for check, level, _ in findings]


def test_versions_that_differ():
    """An update is under way."""
    [(check, level, what)] = found(w1=told(), w2=told(version="2"))
    assert (check, level) == ("version", "note")
    assert "1 (this command, w1); 2 (w2)" in what


def test_a_worker_without_a_lock_server():
    """It puts all its tasks off."""
    findings = found(w1=told(), w2=told(server=None, prefix=None, no_server="no such URL"))
    assert any(level == "serious" and "no such URL" in what for _, level, what in findings)


def test_a_worker_that_needs_no_lock_server():
    """Celery imports the plugin for every worker, also for those that lock nothing."""
    stranger = told(server=None, prefix=None, no_server="no Redis", tasks={}, enabled=None)
    assert found(w1=told(), w2=stranger) == []


def test_a_worker_that_runs_tasks_without_locks():
    """Beside others that lock, or alone."""
    findings = found(w1=told(), w2=told(locks=False, enabled=False))
    [(_, level, what)] = [one for one in findings if "--no-dislock" in one[2]]
    assert (level, "Others lock the same tasks" in what) == ("serious", True)
    findings = found(w2=told(locks=False, enabled=False))
    [(_, level, what)] = [one for one in findings if "--no-dislock" in one[2]]
    assert (level, "Others" in what) == ("serious", False)


def test_keys_that_differ_are_serious():
    """Two workers take different locks for the same task."""
    [(check, level, what)] = found(
        w1=told(), w2=told(tasks={"export": {"lock_key": "export:<corp>"}})
    )
    assert (check, level) == ("options", "serious")
    assert "lock_key of export differs, so it may run twice at a time" in what
    assert "export:<corp> (w2)" in what


def test_a_limit_that_only_one_side_has_is_compared_with_the_default():
    """Options that are the default are not told."""
    options = {"lock_key": "export:<n>", "lock_limit": 3}
    [(_, level, what)] = found(w1=told(), w2=told(tasks={"export": options}))
    assert level == "serious"
    assert "3 (w2); the default (this command, w1)" in what


def test_timeouts_that_differ_are_a_warning():
    """Each lease has the timeout of its holder, and nothing runs twice."""
    options = {"lock_key": "export:<n>", "lock_watchdog_timeout": 60.0}
    [(check, level, _)] = found(w1=told(), w2=told(tasks={"export": options}))
    assert (check, level) == ("options", "warning")


def test_a_key_that_only_this_command_has_is_a_warning():
    """The workers agree, and are what counts."""
    ours = {**OURS, "tasks": {"export": {"lock_key": "new:<n>"}}}
    [(check, level, _)] = found(ours, w1=told(), w2=told())
    assert (check, level) == ("options", "warning")


def test_no_task_has_a_lock():
    """Then there is nothing to examine."""
    ours = {**OURS, "tasks": {}}
    assert [(check, level) for check, level, _ in found(ours, w1=told(tasks={}))] == [
        ("tasks", "note")
    ]


def test_warnings_of_the_start_are_told_once():
    """With the workers that logged them; what concerns the server is looked at from here."""
    warning = "These tasks do X: a.b. Raise it."
    of_server = "The lock server may evict locks. Set it."
    fleet = Fleet({name: told(warnings=[warning, of_server]) for name in ("w1", "w2")}, {})
    [one] = [one for one in workers.about(OURS, fleet) if one.level != "ok"]
    assert one.what == "When w1, w2 started: These tasks do X: a.b."
    assert one.remedy == "Raise it."


def test_processes_that_have_not_told():
    """They may be starting."""
    [(check, level, what)] = found(w1=told(processes=[{"pid": 8, "unchanged_for": None}]))
    assert (check, level, "w1 (pid 8)" in what) == ("renewals", "note", True)


def test_watchdogs_in_trouble():
    """Errors and lateness are a warning, past outages good to know."""
    assert [level for *_, level, _ in found(w1=told(process={"errors": 1}))] == ["warning"]
    [(_, level, what)] = found(w1=told(process={"worst_late": 7.2}))
    assert (level, "up to 7.2 s late" in what) == ("warning", True)
    [(_, level, what)] = found(w1=told(process={"outages": 2}))
    assert (level, "in 2 outages" in what) == ("note", True)


def test_who_parks():
    """A worker may have a task that the app here does not have."""
    assert not workers.parks([OURS])
    assert workers.parks([OURS, told(tasks={"pay": {"lock_on_conflict": "queue"}})])


def test_workers_that_share_a_name():
    """The one that starts next may release the locks of the others."""
    [one, *_] = workers.about(OURS, Fleet({"w1": told()}, {}, twice=["w1"]))
    assert (one.level, "share a name: w1" in one.what) == ("warning", True)


class TestUnderstood:
    def test_an_answer_of_this_version_stays_what_it_is(self):
        """As far as the checks use it."""
        assert understood(json.loads(json.dumps(told()))) == told()

    @pytest.mark.parametrize("answer", [None, [], "x", {}, {"error": "KeyError"}, {"processes": 7}])
    def test_what_is_no_answer(self, answer):
        """An older version, a worker without the plugin, or no reply at all."""
        assert understood(answer) is None

    @pytest.mark.parametrize(
        "strange",
        [
            {"processes": [7, {}, {"pid": "x", "held": None, "errors": [], "outages": "many"}]},
            {"processes": [], "tasks": ["export"], "warnings": "x", "version": 7, "server": {}},
            {"processes": [], "tasks": {"export": 7, "pay": {"lock_key": {"a": [1]}}}},
        ],
    )
    def test_an_answer_of_a_stranger_is_no_reason_to_stop(self, strange):
        """Each check copes with what is left of it."""
        fleet = Fleet({"w1": understood(strange), "w2": told()}, {})
        assert list(workers.about(OURS, fleet))
