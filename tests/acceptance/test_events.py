"""What those see who watch the workers: ``celery events``, Flower, and exporters."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from celery import states
from celery.events.state import State
from click.testing import CliRunner

from celery_dislock.operating.cli import dislock as command
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, wait_for

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery
]

POOLS = ["prefork", "threads", "gevent", "eventlet"]  # solo cannot hold and be refused


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
def test_a_skipped_task_is_revoked(start_fleet, scene, watcher, pool):
    """It is not left in the state STARTED; the event says why, as the result does."""
    fleet = start_fleet(pool, "--task-events")
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    skipped = fleet.send(scenarios.hold, scene.key)
    event = watcher.wait_for(skipped, "task-revoked")
    assert (event["terminated"], event["signum"], event["expired"]) == (False, None, False)
    assert event["reason"].startswith(f"lock {scene.key!r} is held by ")
    assert holder.id in event["reason"]
    assert event["hostname"] == "own1@here"
    assert watcher.state_of(skipped) == states.REVOKED
    assert watcher.state_of(holder) == states.STARTED
    scene.open_gate()
    wait_for("the end", lambda: watcher.state_of(holder) == states.SUCCESS)
    assert len(watcher.of(skipped, "task-revoked")) == 1


def test_a_parked_task_is_seen_to_run_and_to_end(start_fleet, scene, watcher):
    """PARKED while it is in line, for how long the lock was held, and then as any other task."""
    fleet = start_fleet("prefork", "--task-events")
    holder = fleet.send(scenarios.hold_by_itself, scene.key)
    scene.wait_for_report("begin")
    parked = fleet.send(scenarios.hold_or_queue, scene.key)
    event = watcher.wait_for(parked, "task-parked")
    assert (event["key"], event["place"]) == (scene.key, 1)
    assert 0 <= event["held_for"] < LIMIT
    assert watcher.state_of(parked) == "PARKED"
    scene.open_gate(holder.id)
    scene.wait_for_report("begin", times=2)
    wait_for("it is seen to run", lambda: watcher.state_of(parked) == states.STARTED)
    scene.open_gate()
    wait_for("it is seen to end", lambda: watcher.state_of(parked) == states.SUCCESS)


def test_a_parked_task_that_an_operator_drops_is_seen_so(start_fleet, scene, watcher):
    """Who ends it tells it once: the command, or a worker that sweeps in that moment."""
    fleet = start_fleet("prefork", "--task-events")
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    parked = fleet.send(scenarios.hold_or_queue, scene.key)
    watcher.wait_for(parked, "task-parked")
    obj = SimpleNamespace(app=scenarios.app)
    dropped = CliRunner().invoke(command, ["drop", parked.id, "--key", scene.key, "--yes"], obj=obj)
    assert dropped.exit_code == 0, dropped.output
    event = watcher.wait_for(parked, "task-revoked")
    assert event["reason"].startswith("dropped by an operator")
    assert event["hostname"].startswith(("dislock@", "own1@here"))
    assert watcher.state_of(parked) == states.REVOKED
    scene.open_gate()
    holder.get(timeout=LIMIT)


def test_a_copy_that_is_put_off_leaves_the_state_of_the_task(start_fleet, scene, watcher):
    """The task runs: its events come from there."""
    fleet = start_fleet("prefork", "--task-events")
    first = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    fleet.send(scenarios.hold, scene.key, task_id=first.id)
    wait_for("the copy is put off", lambda: fleet.says(first.id, "put off for"))
    assert watcher.state_of(first) == states.STARTED
    assert not watcher.of(first, "task-revoked", "task-retried")
    scene.open_gate()
    scene.wait_for_report("end", times=2)


@pytest.mark.parametrize("pool", POOLS)
def test_a_lost_lock_is_told_while_the_task_runs(start_fleet, scene, watcher, pool):
    """Key, reason and what happens next; then the end of the task counts."""
    fleet = start_fleet(pool, "--task-events")
    running = fleet.send(scenarios.outlive_loss, scene.key)
    scene.wait_for_report("begin")
    scene.lose_the_lock()
    event = watcher.wait_for(running, "task-lock-lost")
    assert (event["key"], event["action"]) == (scene.key, "warn")
    assert event["reason"] == "the server no longer has it: expired, taken or deleted"
    assert event["hostname"] == "own1@here"
    assert watcher.state_of(running) == "LOCK-LOST"
    scene.open_gate()
    wait_for("its end is seen", lambda: watcher.state_of(running) == states.SUCCESS)


def test_events_go_over_rabbitmq(start_fleet, scene, rabbitmq):
    """From the main process and from a pool process, by a connection of its own."""
    fleet = start_fleet("prefork", "--task-events", broker_url=rabbitmq.url)
    with watching(rabbitmq.url) as watcher:
        running = fleet.send(scenarios.outlive_loss, scene.key)
        scene.wait_for_report("begin")
        skipped = fleet.send(scenarios.hold, scene.key)
        watcher.wait_for(skipped, "task-revoked")
        scene.lose_the_lock()
        watcher.wait_for(running, "task-lock-lost")
        scene.open_gate()
        running.get(timeout=LIMIT)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_where_nobody_wants_events_a_pool_process_alone_sends_its_own(
    start_fleet, scene, watcher, pool
):
    """The main process knows that nobody does; a pool process cannot know, as with Celery's own."""
    fleet = start_fleet(pool)
    holder = fleet.send(scenarios.outlive_loss, scene.key)
    scene.wait_for_report("begin")
    skipped = fleet.send(scenarios.outlive_loss, scene.key)
    wait_for("it is skipped", lambda: skipped.state == states.REVOKED)
    scene.lose_the_lock()
    wait_for("it is lost", lambda: fleet.says(holder.id, "is lost"))
    if pool == "prefork":
        watcher.wait_for(holder, "task-lock-lost")
    scene.open_gate()
    holder.get(timeout=LIMIT)
    watcher.look()
    heard = [e["type"] for e in watcher.events if e.get("uuid") in {holder.id, skipped.id}]
    assert heard == (["task-lock-lost"] if pool == "prefork" else [])
