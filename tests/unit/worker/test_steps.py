"""The steps of a worker: its command line, its lock server, its children, and who sweeps."""

import logging
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.concurrency.solo import TaskPool
from celery.worker import WorkController
from celery.worker.components import Pool
from kombu.asynchronous import get_event_loop, hub, set_event_loop

from celery_dislock import Dislock, StoreError
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.store import Store
from celery_dislock.worker.stalled import StalledStep
from celery_dislock.worker.steps import LockStep, SweepStep
from celery_dislock.worker.waiting import WaitingStep
from tests.declaring import declare


@pytest.fixture
def app(plain_app):
    return plain_app


@pytest.fixture
def worker(app):
    return SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here")


@pytest.fixture(autouse=True)
def _without_an_event_loop(monkeypatch):
    monkeypatch.setattr(hub, "_current_loop", None)


def test_the_worker_says_where_its_locks_are(app, worker, caplog):
    """One line has all that two workers must share to share a lock: the server and the prefix."""
    declare(app, name="singleton")
    app.conf.dislock_prefix = "staging"
    with caplog.at_level(logging.INFO, "celery_dislock"):
        LockStep(worker).start(None)
    assert caplog.messages[0] == (
        "Locks are on; lock server: redis://localhost:1/0, prefix: staging"
    )


def test_a_bad_setting_stops_a_worker_that_locks_nothing(app, worker):
    """A --dislock-url that no task uses is checked all the same; --no-dislock checks nothing."""
    with pytest.raises(SystemExit, match="dislock_url='http://x': give the lock server's URL"):
        LockStep(worker, dislock_url=("http://x",))
    LockStep(worker, dislock=False)


def test_what_several_servers_do_not_support_stops_a_worker_that_locks(app, worker):
    """Its message names --no-dislock as a way out, and with that the worker starts."""
    declare(app, name="queues", lock_on_conflict="queue")
    app.finalize()  # before the command line is read
    several = ("redis://a", "redis://b", "redis://c")
    with pytest.raises(SystemExit, match="lock_on_conflict='queue': several lock servers"):
        LockStep(worker, dislock_url=several)
    LockStep(worker, dislock=False, dislock_url=several)


def test_no_dislock_says_so_loudly(app, worker, caplog):
    """An operator sees in the log that nothing locks."""
    step = LockStep(worker, dislock=False)
    assert step.include_if(None)  # or Celery would not start it
    step.start(None)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "LOCKS ARE OFF" in record.message


def test_the_event_loop_is_known_when_the_broker_is_there_again(worker):
    """Else locks of dead processes are released in a thread, of which a fork takes a part along."""
    step, loop = LockStep(worker), set_event_loop(hub.Hub())
    loop.reset()  # as Celery does when the connection is lost
    step.register_with_event_loop(SimpleNamespace(pool=SimpleNamespace()), loop)
    assert get_event_loop() is loop


def test_the_command_line_wins_over_the_setting(app, worker, reachable):
    """--dislock and --dislock-url are written to the app's configuration."""
    app.conf.dislock_enabled = False
    LockStep(worker, dislock=True, dislock_url="redis://other:1/3")
    assert runtime_of(app).enabled is True
    assert runtime_of(app).process.store.server == "redis://other:1/3"


def test_a_worker_without_a_lock_server_refuses_to_start(app, worker, monkeypatch):
    """The message names the server and the ways out; without a flag there must be one, too."""

    def ping(_):
        raise StoreError("redis://localhost:1/0", "Connection refused")

    monkeypatch.setattr(Store, "ping", ping)
    with pytest.raises(SystemExit, match="redis://localhost:1/0: Connection refused") as caught:
        LockStep(worker, dislock=True)
    assert "--no-dislock" in caught.value.code
    other = Celery("shop", broker="amqp://localhost//", set_as_current=False)
    Dislock(other)
    declare(other, name="singleton")
    with pytest.raises(SystemExit, match="dislock_url"):
        LockStep(SimpleNamespace(app=other, pool_cls=TaskPool, hostname="w1@here"))


def test_dead_children_are_looked_for_often(app):
    """The event loop asks the pool to look for exits, once however often it is set up."""
    calls = []

    class Hub:
        def call_repeatedly(self, delay, call):
            calls.append(call)
            return SimpleNamespace(cancel=lambda: calls.remove(call))

    declare(app, name="singleton")
    step = LockStep(SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here"))
    worker = SimpleNamespace(pool=SimpleNamespace(maintain_pool="maintain"))
    step.register_with_event_loop(worker, Hub())
    step.register_with_event_loop(worker, Hub())
    assert calls == ["maintain"]
    step.register_with_event_loop(SimpleNamespace(pool=SimpleNamespace()), Hub())


def test_a_worker_without_a_task_that_locks_does_not_sweep(app, worker):
    """One with tasks that do not park does: others may have left a line."""
    declare(app, name="plain", base=Task, lock_key=None)
    assert SweepStep(worker).include_if(worker) is False
    declare(app, name="skips")
    assert SweepStep(worker).include_if(worker) is True


@pytest.mark.parametrize(
    "conf", [{"dislock_enabled": False}, {"dislock_url": ["redis://a", "redis://b", "redis://c"]}]
)
def test_where_nothing_is_parked_nobody_sweeps(app, worker, conf):
    """Without locks, and with several lock servers, whatever a callable may say."""
    app.conf.update(conf)
    declare(app, lock_on_conflict=lambda *_: None)
    assert SweepStep(worker).include_if(worker) is False


@pytest.mark.parametrize("kind", [SweepStep, StalledStep, WaitingStep])
def test_it_starts_after_the_pool(kind):
    """Else children may be forked while its thread imports a module, and wait for that for ever."""
    for _ in range(10):  # Celery orders steps that do not need each other by chance
        steps = [type(f"{kind.__name__}{number}", (kind,), {}) for number in range(3)]
        blueprint = WorkController.Blueprint(steps={LockStep, *steps})
        order = blueprint._finalize_steps(blueprint.claim_steps())
        assert all(order.index(step) > order.index(Pool) for step in steps)
