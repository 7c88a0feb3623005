"""The answer to ``celery inspect dislock``: what a worker tells of its locks."""

import json
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from celery.worker import state
from celery.worker.control import Panel

from celery_dislock import Key, SingletonTask, StoreError
from celery_dislock.operating.inspection import SHORT, inspect_locks, inspect_task
from celery_dislock.parking.process import runtime_of
from celery_dislock.plugin import LockStep  # noqa: F401 -- as a worker does
from celery_dislock.servers.overview import PLACES_SHOWN
from tests.staged import holder, lock, place
from tests.unit.deliveries import arrived

LATER = "2030-01-01T00:00:00+00:00"


class Queue(SimpleNamespace):
    """What a worker's timer has."""

    def __init__(self, entries):
        super().__init__(queue=entries)


def decide(_task, _conflict):
    return None


class Worker:
    """A worker whose pool executes some requests."""

    def __init__(self, app, patch):
        self.app = app
        self.steps = [SimpleNamespace(warnings=["Raise it."]), object()]
        self._requests = []
        patch.setattr(state, "active_requests", self._requests)

        @app.task(base=SingletonTask, name="export", lock_key="export:<n>", shared=False)
        def export(n): ...

        @app.task(name="other", shared=False)
        def other(): ...

    def run(self, *args, name="export", task_id="1", began=1.0, **more):
        about = {"id": task_id, "args": args, "kwargs": {}, "time_start": began, **more}
        task = self.app.tasks[name]
        self._requests.append(
            SimpleNamespace(task=task, hostname="w@h", worker_pid=7, request_dict={}, **about)
        )

    def ask(self, **given):
        asked = SimpleNamespace(app=self.app, consumer=SimpleNamespace(controller=self))
        answer = inspect_locks(asked, **given)
        json.dumps(answer)
        return answer


@pytest.fixture
def worker(app, monkeypatch):
    return Worker(app, monkeypatch)


@pytest.mark.parametrize("other", [{"worker": "v@h"}, {"id": "2"}, {"turn": True}])
def test_a_task_that_does_not_hold_its_lock_is_told(worker, server, other):
    """It waits, or has lost it: the lock is free, another's, or reserved for a message."""
    worker.run(7)
    server.put(lock("export:7", holders=[holder(**{"id": "1", "worker": "w@h", **other})]))
    [lease] = worker.ask()["leases"]
    assert not lease["held"]


def test_a_task_that_runs_without_its_lock_is_told_from_one_that_waits(worker, server):
    """It began long ago and does not stand in line; nobody knows that of one behind many."""
    server.put(
        lock("export:2", waiting=1, line=[place(parked=False, ticket="", id="2", task="export")]),
        lock("export:3", waiting=PLACES_SHOWN + 1),
    )
    for n in (1, 2, 3):
        worker.run(n, task_id=str(n))
    worker.run(4, task_id="4", began=time.time())
    worker.run(5, task_id="5", began=None)
    missed = {one["key"]: one["missed"] for one in worker.ask()["leases"]}
    assert [key for key, so in missed.items() if so] == ["export:1"]
    assert len(missed) == 5


def test_a_task_that_the_pool_has_forgotten_is_told_if_it_has_its_lock(worker, server):
    """Before 5.6.3, Celery does not hear the end of what ran when it lost its broker."""
    server.put(lock("export:2", holders=[holder(id="2", worker="w@h")]))
    for n in (1, 2):
        worker.run(n, task_id=str(n), _apply_result=lambda: None)
    assert [one["key"] for one in worker.ask()["leases"]] == ["export:2"]


def test_a_worker_tells_of_one_task(worker, monkeypatch):
    """Whether it runs or waits here and for which keys, until when, and which queues it has."""
    consumer = SimpleNamespace(task_consumer=None, timer=SimpleNamespace(schedule=Queue([])))
    asked = SimpleNamespace(app=worker.app, consumer=consumer)
    assert inspect_task(asked, "1") == {"locks": True, "queues": [], "revoked": False, "is": None}
    consumer.task_consumer = SimpleNamespace(queues=[SimpleNamespace(name="mail")])
    later = arrived(worker.app.tasks["export"], "9", eta=LATER, dislock={"v": 1, "put_off": 2})
    entry = SimpleNamespace(entry=SimpleNamespace(args=(later,)))
    consumer.timer.schedule = Queue([entry, SimpleNamespace(entry=SimpleNamespace(args=None))])
    told = inspect_task(asked, "9")
    assert (told["is"], told["queues"], told["put_off"]) == ("scheduled", ["mail"], 2)
    assert told["eta"] == datetime.fromisoformat(LATER).timestamp()
    assert told["task"] == "export"
    json.dumps(told)
    monkeypatch.setattr(state, "reserved_requests", [later])
    assert inspect_task(asked, "9")["is"] == "reserved"


def test_tasks_without_a_lock_are_left_out(worker):
    """And those whose key cannot be built: their bodies have not begun."""
    worker.run(name="other")
    worker.run(object())
    assert worker.ask()["leases"] == []


def test_a_lock_server_that_is_away_or_not_there_is_told(worker, server):
    """The worker answers nevertheless."""
    worker.run(7)
    server.error = StoreError("redis://h", "away")
    answer = worker.ask()
    assert ("away" in answer["unavailable"], answer["leases"]) == (True, [])
    worker.app.conf.update(dislock_url=None, broker_url="memory://")
    runtime_of(worker.app).close()
    answer = worker.ask()
    assert "neither the broker nor the result backend is a Redis" in answer["no_server"]
    assert answer["leases"] == []


def test_the_command_line_gets_it_in_short(worker, server):
    """A line for each lease, of some leases; "full" has everything."""
    meta = Panel.meta["dislock"]
    for n in range(SHORT + 5):
        worker.run(n, task_id=str(n))
    late = holder(id="0", worker="w@h", pid=7, held=90.0, renewed=25.0, remaining=5.0)
    server.put(lock("export:0", holders=[late]))
    short = worker.ask(**{meta.variadic: []})
    assert short["tasks"] == 1
    first, second, *_, last = short["leases"]
    assert first == "export[0] in process 7 has held export:0 for 90 s, last renewed 25 s ago"
    assert second == "export[1] in process 7 does not hold export:1"
    assert last == "and 5 more"
    full = worker.ask(**{meta.variadic: ["full"]})
    assert full["tasks"]["export"] == {"lock_key": "export:<n>"}
    assert len(full["leases"]) == SHORT + 5


def test_it_has_what_can_be_compared(worker, server):
    """Version, server, prefix, whether tasks lock, and options that are not the defaults."""
    options = {"lock_key": ("a", "b"), "lock_watchdog_timeout": 60, "lock_limit": 1}
    options["lock_on_conflict"] = decide

    @worker.app.task(base=SingletonTask, name="own", shared=False, **options)
    def own(): ...

    answer = worker.ask()
    assert (answer["server"], answer["prefix"]) == (server.name, "dislock")
    assert (answer["locks"], answer["enabled"], answer["warnings"]) == (True, None, ["Raise it."])
    told = {"lock_key": ["a", "b"], "lock_watchdog_timeout": 60.0}
    # JSON has no functions, whose repr has an address.
    assert answer["tasks"]["own"] == {**told, "lock_on_conflict": f"{__name__}.decide"}


def test_terms_of_keys_and_rates_are_told(worker):
    """As people say them, so that two ways to write a rate are none that differ."""

    def key(): ...

    keys = [Key("a", rate="100/m"), Key(key, limit=2, rate="6/60s", cost=2), "c"]
    keys.append(Key("d", limit=key, rate=key, cost=key))

    @worker.app.task(base=SingletonTask, name="api", shared=False, lock_key=keys, lock_rate=9)
    def api(): ...

    told, made = worker.ask()["tasks"]["api"], f"{__name__}.{key.__qualname__}"
    assert told["lock_rate"] == "9 a second"
    assert told["lock_key"] == [
        {"key": "a", "rate": "100 a minute"},
        {"key": made, "limit": 2, "rate": "6 a minute", "cost": 2},
        "c",
        {"key": "d", "limit": made, "rate": made, "cost": made},
    ]
