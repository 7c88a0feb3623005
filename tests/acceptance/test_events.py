"""What those see who watch the workers: ``celery events``, Flower, and exporters."""

import contextlib

import pytest
from celery import states
from celery.events.state import State

from tests.acceptance import scenarios
from tests.acceptance.fleet import wait_for

POOLS = ["prefork", "threads", "gevent"]  # solo cannot hold and be refused


class Watcher:
    """Keeps all events, and the state that Celery makes of them, as a monitor does."""

    def __init__(self, own):
        self._own = own
        self.state = State()
        self.events = []

    def heard(self, event):
        self.events.append(event)
        self.state.event(event)

    def look(self):
        with contextlib.suppress(TimeoutError):
            while True:
                self._own.drain_events(timeout=0.1)

    def of(self, result, *types):
        """The events of a task, of these types."""
        self.look()
        return [e for e in self.events if e.get("uuid") == result.id and e["type"] in types]

    def wait_for(self, result, type_):
        """Wait for an event of a task; return it."""
        return wait_for(f"{type_} of {result.id}", lambda: self.of(result, type_))[0]

    def state_of(self, result):
        self.look()
        task = self.state.tasks.get(result.id)
        return task.state if task is not None else None


@contextlib.contextmanager
def watching(url):
    """Hear the events on a broker from now on."""
    with scenarios.app.connection(url) as connection:
        receiver = scenarios.app.events.Receiver(connection)
        with receiver.consumer_context(wakeup=False) as (own, _, _):
            watcher = Watcher(own)
            receiver.handlers["*"] = watcher.heard
            watcher.look()  # from here on they are kept
            yield watcher


@pytest.fixture
def watcher(server):
    with watching(server.url) as watcher:
        yield watcher


@pytest.mark.parametrize("pool", POOLS)
def test_what_becomes_of_tasks_is_seen(start_fleet, scene, watcher, pool):
    """Skipped is REVOKED and not STARTED, a copy changes no state, and a lost lock is told."""
    fleet = start_fleet(pool, "--task-events")
    running = scene.begin(fleet, scenarios.outlive_loss)
    skipped = fleet.send(scenarios.hold, scene.key)
    event = watcher.wait_for(skipped, "task-revoked")
    assert (event["terminated"], event["signum"], event["expired"]) == (False, None, False)
    assert event["reason"].startswith(f"lock {scene.key!r} is held by ")
    assert running.id in event["reason"]
    assert event["hostname"] == "own1@here"
    assert watcher.state_of(skipped) == states.REVOKED
    if pool == "prefork":  # elsewhere Celery forgets a task whose copy has ended in its process
        fleet.send(scenarios.outlive_loss, scene.key, task_id=running.id)
        wait_for("the copy is put off", lambda: fleet.says(running.id, "put off for"))
        assert watcher.state_of(running) == states.STARTED
        assert not watcher.of(running, "task-revoked", "task-retried")
    scene.lose_the_lock()
    event = watcher.wait_for(running, "task-lock-lost")
    assert (event["key"], event["action"]) == (scene.key, "warn")
    assert event["hostname"] == "own1@here"
    assert event["reason"] == "the server no longer has it: expired, taken or deleted"
    assert watcher.state_of(running) == "LOCK-LOST"
    scene.open_gate()
    wait_for("its end is seen", lambda: watcher.state_of(running) == states.SUCCESS)
    scene.wait_for_report("end", times=2 if pool == "prefork" else 1)
    assert len(watcher.of(skipped, "task-revoked")) == 1
