"""What eager tasks do: among others, a test for each row of the table in test-your-tasks.md.

What they do about duplicates is in tests/unit/tasks/test_sending.py.
"""

import sys
from functools import partial

import pytest
from celery import Celery, chain, chord
from celery.exceptions import Reject, TaskRevokedError

from celery_dislock import Dislock, LockHeldError, SettingsError, StoreError
from celery_dislock.worker.steps import check_lock_server
from tests.declaring import declare


@pytest.fixture
def app(dislock_server):
    app = Celery("eager", set_as_current=False)
    app.conf.task_always_eager = True
    Dislock(app)
    dislock_server.use(app)
    return app


@pytest.fixture
def declared(app):
    """Declare a task of the key "k"."""
    return partial(declare, app)


def seven():
    return 7


@pytest.mark.parametrize(
    ("strategy", "state", "error"),
    [
        ("skip", "REVOKED", TaskRevokedError),
        ("raise", "FAILURE", LockHeldError),
        ("retry", "FAILURE", LockHeldError),
        ("wait", "FAILURE", LockHeldError),
        ("queue", "FAILURE", LockHeldError),
        ("cancel", "FAILURE", LockHeldError),
        ("reject", "REJECTED", Reject),
        (lambda *_: None, "REVOKED", TaskRevokedError),
    ],
)
def test_a_conflict_ends_an_eager_task_at_once(dislock_server, declared, strategy, state, error):
    """Nothing waits, whatever it may in a worker."""
    task = declared(seven, lock_on_conflict=strategy)
    with dislock_server.hold("k"):
        result = task.delay()
    assert result.state == state
    assert isinstance(result.result, error)
    if strategy == "reject":
        assert result.get() is None
    else:
        with pytest.raises(error, match="somebody else"):
            result.get()
    assert task.delay().get() == 7


def test_what_ends_an_eager_task_is_stored_if_results_are(dislock_server, app, declared):
    """Celery stores an eager task's result if it is told to, and so is that of a skipped one."""
    app.conf.task_store_eager_result = True
    task = declared(seven)
    with dislock_server.hold("k"):
        dislock_server.assert_skipped(app.AsyncResult(task.delay().id))
    assert app.AsyncResult(task.delay().id).get() == 7


def test_a_retry_runs_under_the_lock_that_is_held(dislock_server, declared):
    """Within the body that retries, as Celery does it; the lock is free after the last."""
    leases = []

    def body(self):
        leases.append(self.lease.held)
        dislock_server.assert_locked("k")
        if len(leases) < 3:
            raise self.retry(countdown=0)
        return 7

    task = declared(body, lock_unique_until="end")
    assert task.delay().get() == 7
    assert leases == [True] * 3
    dislock_server.assert_free("k")


CANVASES = [chain, lambda *steps: chord(steps[:1], steps[1])]


@pytest.fixture
def told():
    """The results with which the tasks ran that other() declares."""
    return []


@pytest.fixture
def other(declared, told):
    """A task that takes no lock."""

    def note(result=None):
        told.append(result)

    return declared(note, name="other", lock_key=False)


@pytest.mark.parametrize("of", CANVASES)
def test_a_skipped_part_ends_its_chain_or_chord(dislock_server, declared, other, told, of):
    """The call raises, as what comes after it cannot run."""
    part = declared(seven)
    with dislock_server.hold("k"), pytest.raises(TaskRevokedError):
        of(part.s(), other.s())()
    assert told == []
    of(part.s(), other.s())()
    assert len(told) == 1


@pytest.mark.parametrize("of", CANVASES)
def test_a_skipped_last_part_is_the_result(dislock_server, declared, other, told, of):
    """The call returns it, and raises nothing."""
    with dislock_server.hold("k"):
        result = of(other.s(), declared(seven).si())()
    assert (told, result.state) == ([None], "REVOKED")
    with pytest.raises(TaskRevokedError):
        result.get()


def test_a_lock_server_that_is_away_fails_the_task(dislock_server, declared):
    """There is no later for an eager task."""
    task = declared(seven)
    with dislock_server.outage():
        assert isinstance(task.delay().result, StoreError)
    assert task.delay().get() == 7


class TestOfMemory:
    """A lock server that is named memory://."""

    @pytest.fixture
    def app(self):
        app = Celery("notebook", set_as_current=False)
        app.conf.update(task_always_eager=True, dislock_url="memory://")
        return app

    def test_eager_tasks_and_plain_python_share_it(self, app, declared):
        """It is started by the first lock."""
        with Dislock(app) as dislock:
            task = declared(seven, lock_on_conflict="raise")
            with dislock.lock("k"), pytest.raises(LockHeldError):
                task.delay().get()
            assert task.delay().get() == 7

    def test_a_worker_refuses_it(self, app, declared):
        """And says why; without locks it starts."""
        declared(seven)
        with pytest.raises(SettingsError, match="inside this process"):
            check_lock_server(app)
        app.conf.dislock_enabled = False
        assert check_lock_server(app) == ("", [])

    def test_a_broker_in_memory_is_no_lock_server(self):
        """Kombu has such a URL, too."""
        app = Celery("notebook", broker="memory://", set_as_current=False)
        with pytest.raises(SettingsError, match="neither the broker nor the result backend"):
            Dislock(app).lock("k").try_acquire()

    @pytest.mark.parametrize("missing", ["fakeredis._clients._tcp_server", "lupa"])
    def test_without_fakeredis_it_says_what_to_install(self, app, monkeypatch, missing):
        """It is an extra, of which a part may be there; the command is said once."""
        monkeypatch.delitem(sys.modules, "celery_dislock.servers.memory", raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(SettingsError) as refused:
            Dislock(app).lock("k").try_acquire()
        assert str(refused.value).count("pip install 'celery-dislock[testing]'") == 1
