"""The answer to ``celery inspect dislock``, with a lock server that a test decides about."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from celery.worker.control import Panel

from celery_dislock import SingletonTask, StoreError
from celery_dislock.config.options import TaskOptions
from celery_dislock.operating import inspection
from celery_dislock.operating.inspection import SHORT, differing, inspect_locks
from celery_dislock.plugin import LockStep  # noqa: F401 -- as a worker does
from celery_dislock.servers.overview import Overview
from tests.unit.fakes import without_strangers
from tests.unit.operating.checks.examples import holder, lock


@pytest.fixture
def running(monkeypatch):
    """The requests that the worker's pool executes."""
    requests = []
    monkeypatch.setattr(inspection.worker_state, "active_requests", requests)
    return requests


@pytest.fixture
def server(monkeypatch):
    """The holders of each lock by its name; or an error."""
    holders = {}

    def look(_self, names):
        if isinstance(holders.get("*"), StoreError):
            raise holders["*"]
        return [lock(name=name, holders=holders.get(name, [])) for name in names]

    monkeypatch.setattr(Overview, "look", look)
    return holders


@pytest.fixture
def worker(plain_app, running, server):
    without_strangers(plain_app)

    @plain_app.task(base=SingletonTask, name="export", lock_key="export:<n>", shared=False)
    def export(n): ...

    @plain_app.task(name="other", shared=False)
    def other(): ...

    def run(n, name="export", task_id="1"):
        task = plain_app.tasks[name]
        about = {"id": task_id, "args": (n,) if name == "export" else (), "kwargs": {}}
        running.append(SimpleNamespace(task=task, hostname="w@h", worker_pid=7, **about))

    steps = [SimpleNamespace(warnings=["Raise it."]), object()]
    return SimpleNamespace(app=plain_app, steps=steps, run=run)


def ask(worker, **given):
    state = SimpleNamespace(app=worker.app, consumer=SimpleNamespace(controller=worker))
    answer = inspect_locks(state, **given)
    json.dumps(answer)
    return answer


@pytest.mark.parametrize("other", [{"worker": "v@h"}, {"id": "2"}, {"turn": True}])
def test_a_task_that_does_not_hold_its_lock_is_told(worker, server, other):
    """It waits, or has lost it: the lock is free, another's, or reserved for a message."""
    worker.run(7)
    server["dislock:{export:7}"] = [holder(**{"id": "1", "worker": "w@h", **other})]
    [lease] = ask(worker)["leases"]
    assert not lease["held"]


def test_tasks_without_a_lock_are_left_out(worker):
    """And those whose key cannot be built: their bodies have not begun."""
    worker.run(0, name="other")
    worker.run(object())
    assert ask(worker)["leases"] == []


def test_a_lock_server_that_is_away_is_told(worker, server):
    """The worker answers nevertheless."""
    worker.run(7)
    server["*"] = StoreError("redis://h", "away")
    answer = ask(worker)
    assert "away" in answer["unavailable"]
    assert answer["leases"] == []


def test_the_command_line_gets_it_in_short(worker, server):
    """A line for each lease, of some leases; "full" has everything."""
    meta = Panel.meta["dislock"]
    for n in range(SHORT + 5):
        worker.run(n, task_id=str(n))
    late = holder(id="0", worker="w@h", pid=7, held=90.0, renewed=25.0, remaining=5.0)
    server["dislock:{export:0}"] = [late]
    short = ask(worker, **{meta.variadic: []})
    assert short["tasks"] == 1
    first, second, *_, last = short["leases"]
    assert first == "export[0] in process 7 has held export:0 for 90 s, last renewed 25 s ago"
    assert second == "export[1] in process 7 does not hold export:1"
    assert last == "and 5 more"
    full = ask(worker, **{meta.variadic: ["full"]})
    assert full["tasks"] == {"export": {"lock_key": "export:<n>"}}
    assert len(full["leases"]) == SHORT + 5


def test_it_has_what_can_be_compared(worker):
    """Version, server, prefix, whether tasks lock, and options that are not the defaults."""
    worker.app.conf.dislock_url = "redis://:secret-word@h:1/0"
    answer = ask(worker)
    assert answer["server"] == "redis://:***@h:1/0"
    assert (answer["prefix"], answer["locks"], answer["enabled"]) == ("dislock", True, None)
    assert answer["tasks"] == {"export": {"lock_key": "export:<n>"}}
    assert answer["warnings"] == ["Raise it."]
    assert "secret-word" not in json.dumps(answer)


def test_a_worker_without_a_lock_server_answers(worker):
    """It says what is missing."""
    worker.app.conf.dislock_url = None
    worker.app.conf.broker_url = "memory://"
    worker.run(7)
    answer = ask(worker)
    assert "neither the broker nor the result backend is a Redis" in answer["no_server"]
    assert answer["leases"] == []


def decide(_task, _conflict):
    return None


def test_the_options_that_differ_from_the_defaults_are_told():
    """Others are left out; JSON has no tuples and no functions, whose repr has an address."""
    options = TaskOptions(
        lock_key=("a", "b"), lock_watchdog_timeout=60.0, lock_limit=1, lock_on_conflict=decide
    )
    assert differing(options) == {
        "lock_key": ["a", "b"],
        "lock_watchdog_timeout": 60.0,
        "lock_on_conflict": f"{__name__}.decide",
    }
