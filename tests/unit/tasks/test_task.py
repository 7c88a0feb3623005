"""How the guard gets around a body: what is wrapped, and what is left alone."""

from __future__ import annotations

import pytest
from celery import Task
from celery.exceptions import Ignore

from celery_dislock import SettingsError, SingletonTask
from celery_dislock.locks.attempt import Attempt
from celery_dislock.messages.events import events_of
from celery_dislock.tasks.task import declared_options, install, lease_of, runtime_of


def test_an_app_has_one_runtime_which_is_made_when_it_is_asked_for(app):
    """All tasks of an app share a store and a watchdog."""
    del app.__dict__["_dislock_runtime"]
    assert runtime_of(app) is runtime_of(app)


def test_a_guard_is_installed_once(app):
    """A second installation would take the lock inside the lock."""

    @app.task(name="t", base=SingletonTask, lock_key="k")
    def task(): ...

    kind = type(app.tasks["t"])
    guard, call = kind.dislock_guard, kind.__call__
    install(kind, app)
    assert (kind.dislock_guard, kind.__call__) == (guard, call)


@pytest.mark.parametrize(
    ("name", "key", "guarded"),
    [
        ("shop.t", "k", True),
        ("shop.t", False, False),
        ("celery.t", None, False),
        ("celery.t", "k", True),
    ],
)
def test_celerys_own_tasks_and_those_that_say_false_are_left_alone(app, name, key, guarded):
    """Celery's tasks inherit the app's base class, and nobody means them unless a key says so."""

    def body(): ...

    app.task(body, name=name, base=Task, lock_key=key)
    kind = type(app.tasks[name])
    install(kind, app)
    assert ("dislock_guard" in vars(kind)) is guarded


def test_a_class_without_a_name_is_left_alone(app):
    """A base class is bound by whatever looks at it, and its subclasses would inherit a guard."""

    class Base(SingletonTask):
        abstract = True

    install(Base, app)
    assert "dislock_guard" not in vars(Base)


def test_a_task_with_a_bad_option_is_taken_out_of_the_app(app):
    """Else the next use would find it registered, and unguarded."""

    @app.task(name="t", base=SingletonTask, lock_limit=0)
    def task(): ...

    with pytest.raises(SettingsError):
        app.finalize()
    assert "t" not in app._tasks


def test_only_what_a_user_declared_is_an_option(app):
    """Methods of a class body and what Celery gives every task are not; the nearest class wins."""

    class Base(SingletonTask):
        abstract = True
        lock_limit = 2
        lock_key = "base"

        def lock_name(self): ...

    @app.task(name="t", base=Base, lock_key="own")
    def task(): ...

    found = declared_options(type(app.tasks["t"]))
    assert {name: value for name, value in found.items() if name.startswith("lock_")} == {
        "lock_limit": 2,
        "lock_key": "own",
    }


def test_a_task_that_does_not_run_has_no_lease(app):
    """Neither by its property nor by the function that any task can be asked with."""

    @app.task(name="t", base=SingletonTask, lock_key="k")
    def task(): ...

    assert app.tasks["t"].lease is None
    assert lease_of(app.tasks["t"]) is None


def test_what_ends_a_task_unrun_leaves_no_traceback(app, world, monkeypatch):
    """A pool process would copy each frame and send them all; the body's own are kept."""

    @app.task(name="t", base=SingletonTask, lock_key="k", throws=(Ignore,))
    def task():
        raise Ignore

    world.lease(owner="other")
    kind = app.tasks["t"]
    kind.push_request(id="1", called_directly=False, is_eager=True, hostname="w1", retries=0)
    try:
        with pytest.raises(Ignore) as caught:
            kind()
        refused = caught.value.__traceback__
        world.store.leases.clear()
        del kind.request.dislock
        with pytest.raises(Ignore) as caught:
            kind()
    finally:
        kind.pop_request()

    def depth(traceback):
        return 0 if traceback is None else 1 + depth(traceback.tb_next)

    assert depth(refused) < depth(caught.value.__traceback__)


class TestEvents:
    """What those who watch the worker hear of the lease of a task that runs."""

    @pytest.fixture
    def sent(self, app):
        sent = []
        events_of(app).send = lambda type_, worker, **fields: sent.append((type_, worker, fields))
        return sent

    @staticmethod
    def lease(world, task, **options):
        holder = {"task": "t", "id": "1", "worker": "w1@here", "pid": 7}
        attempt = Attempt("me", holder, sender=task)
        return world.lock(**options).try_acquire(attempt)

    @pytest.fixture
    def task(self, app):
        @app.task(name="t", base=SingletonTask, lock_key="k", shared=False)
        def task(): ...

        app.finalize()
        return app.tasks["t"]

    def test_a_lost_lock_is_told_with_key_and_reason(self, world, task, sent):
        """And with what becomes of the body."""
        lease = self.lease(world, task, lock_on_lost="raise")
        lease.lose("somebody deleted it")
        lease.report_lost()
        told = {"uuid": "1", "key": "k", "reason": "somebody deleted it", "action": "raise"}
        assert sent == [("task-lock-lost", "w1@here", told)]

    def test_a_cap_is_told_with_renewals_and_end(self, world, task, sent):
        """The lease goes on for a while."""
        lease = self.lease(world, task)
        lease.renewals = 360
        lease.report_capped()
        [(type_, worker, fields)] = sent
        assert (type_, worker) == ("task-lock-capped", "w1@here")
        assert fields.pop("ends_in") == pytest.approx(29.5)
        assert fields == {"uuid": "1", "key": "k", "renewals": 360, "action": "expire"}

    def test_a_task_without_events_has_none(self, world, task, sent):
        """As Celery's own."""
        task.send_events = False
        self.lease(world, task).report_lost()
        assert sent == []

    def test_a_lock_of_plain_python_has_none(self, world, task, sent):
        """There is no task that a monitor could show."""
        lease = self.lease(world, object())
        lease.report_lost()
        lease.report_capped()
        assert sent == []
