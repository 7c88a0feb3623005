"""How the guard gets around a body: what is wrapped, and what is left alone."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from threading import Thread
from unittest import mock

import pytest
from celery import Task
from celery.exceptions import Ignore
from celery.signals import task_postrun, task_prerun

from celery_dislock import SettingsError, SingletonTask, current_lease, ensure_held, hooks
from celery_dislock.hooks import install
from celery_dislock.tasks.task import declared_options, follow_contexts
from tests.unit.deliveries import deliver


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


def test_the_options_of_a_class_count_for_more_than_those_of_its_base():
    """A base class says what most of its tasks do; one of them may do the opposite."""

    class Renewed(SingletonTask):
        lock_watchdog_timeout = 60
        lock_on_cap = "raise"
        lock_on_conflict = "wait"
        lock_wait_timeout = 5

    class Fixed(Renewed):
        lock_expire = 600
        lock_on_conflict = "skip"

    class RenewedAgain(Fixed):
        lock_watchdog_timeout = 90

    assert declared_options(Fixed) == {"lock_expire": 600, "lock_on_conflict": "skip"}
    again = {"lock_watchdog_timeout": 90, "lock_on_conflict": "skip"}
    assert declared_options(RenewedAgain) == again


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
        del kind.request.dislock_delivery
        with pytest.raises(Ignore) as caught:
            kind()
    finally:
        kind.pop_request()

    def depth(traceback):
        return 0 if traceback is None else 1 + depth(traceback.tb_next)

    assert depth(refused) < depth(caught.value.__traceback__)


def unique(app, **options):
    options = {"lock_key": "k", "lock_unique_until": "end", **options}
    ran = []

    @app.task(name="t", base=SingletonTask, **options)
    def task():
        ran.append(1)

    task.ran = ran
    return task


class TestPatched:
    """A method of Celery's that a test patches is patched for our tasks, too, and no longer."""

    @pytest.mark.parametrize("used_before", [False, True])
    def test_apply(self, app, used_before):
        """It is asked for its result once, and runs nothing."""
        task = unique(app)
        if used_before:
            assert task.dislock_guard
        with mock.patch.object(Task, "apply") as patched:
            result = task.apply()
        assert (result, patched.call_count, task.ran) == (patched.return_value, 1, [])
        task.apply()
        assert (patched.call_count, task.ran) == (1, [1])

    def test_on_replace(self, app, world):
        """As a test does that is not to send what replaces a task."""

        @app.task(name="t", base=SingletonTask, lock_key="k", bind=True)
        def task(self):
            return self.replace(self.si())

        assert task.dislock_guard
        with mock.patch.object(Task, "on_replace", return_value=7) as patched:
            assert task.apply().get() == 7
        assert patched.called


@pytest.mark.parametrize("at", ["make_guard", "_guarded", "custom_call", "_override"])
def test_two_threads_that_install_a_guard_wrap_once(app, world, monkeypatch, at):
    """Each may be in the middle of it when the other begins: one lock, and one reservation."""

    @app.task(name="t", lock_key="k", lock_unique_until="end")
    def task():
        return "ran"

    kind, began = type(app.tasks["t"]), []
    go_on = getattr(hooks, at)

    def another_thread(*args):
        if not began:
            began.append(1)
            install(kind, app)
        return go_on(*args)

    monkeypatch.setattr(hooks, at, another_thread)
    install(kind, app)
    assert began
    assert task.apply().get() == "ran"
    assert len(world.store.asked("acquire")) == 1
    assert [call[0] for call in world.store.reservations.asked].count("reserve") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("key", "lock_key"),
        ("lock", "lock_key"),
        ("timeout", "lock_watchdog_timeout"),
        ("ttl", "lock_expire"),
    ],
)
def test_an_option_by_a_name_that_others_use_is_answered_with_ours(app, name, words):
    """Celery would take it for an attribute, and the task would lock by all its arguments."""
    with pytest.raises(SettingsError, match=words) as caught:

        @app.task(name="t", base=SingletonTask, **{name: "export"})
        def task(): ...

        app.finalize()

    assert caught.value.option == name


def test_an_attribute_of_a_class_may_have_any_name(app):
    """A task's class has a timeout of its own, and a task of that class may set it."""

    class Fetch(SingletonTask):
        timeout = 5
        key = "own"

    @app.task(name="t", base=Fetch, timeout=10)
    def task(): ...

    assert (app.tasks["t"].timeout, app.tasks["t"].key) == (10, "own")
    assert app.tasks["t"].dislock_guard is not None


async def coroutine(self=None, *_): ...


async def generator(self=None):
    yield


@pytest.mark.parametrize("where", ["run", "__call__"])
def test_a_generator_that_no_pool_awaits_is_refused(app, where):
    """Celery would make an object of it, and the lock would be released before it begins."""
    kind = type("Export", (SingletonTask,), {"name": "t", where: generator})
    with pytest.raises(SettingsError, match=rf"t: {where}=.* which no pool awaits"):
        app.register_task(kind())
    assert "t" not in app._tasks


@pytest.mark.parametrize("where", ["run", "__call__"])
def test_a_body_that_nobody_awaits_fails_and_takes_no_lock(app, broker, heard, where):
    """A sender has no pool, so the task is bound; who runs it has to await it."""
    kind = type("Export", (SingletonTask,), {"name": "t", "lock_key": "k", where: coroutine})
    task = app.register_task(kind())
    task.delay()
    assert len(broker.sent) == 1
    failed = deliver(task, "1").retval
    assert isinstance(failed.exception, SettingsError)
    assert "t: worker_pool='no worker': its body is an `async def`" in str(failed.exception)
    assert not heard


def test_an_eager_body_is_awaited_under_its_lock(app):
    """As a worker with a pool that awaits does it."""

    @app.task(bind=True, base=SingletonTask, lock_key="k")
    async def task(self):
        await asyncio.sleep(0)
        held = self.lease.held, current_lease() is self.lease, self.request.id
        ensure_held()
        return held

    result = task.apply()
    assert result.get() == (True, True, result.id)


def test_what_a_plain_body_returns_must_not_have_to_be_awaited(app):
    """It would run when the lock is free again."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        return coroutine()

    with pytest.raises(SettingsError, match=r"t.*: run='coroutine': .*without its lock"):
        task.apply().get()


def test_a_body_that_the_tracer_runs_elsewhere_takes_its_lock(app, monkeypatch):
    """celery-aio-pool's tracer has the request on the stack of its own thread."""
    held = []
    monkeypatch.setattr(task_prerun, "receivers", [*task_prerun.receivers])
    monkeypatch.setattr(task_postrun, "receivers", [*task_postrun.receivers])
    follow_contexts()

    @app.task(base=Task)
    def eager(): ...

    @app.task(bind=True, base=SingletonTask, lock_key="k")
    def task(self):
        eager.apply()
        held.append(self.lease.held)

    @app.task(base=Task)
    def other():
        task()

    kind = type(app.tasks[task.name])
    inner = kind.__call__

    def in_a_thread(self):  # also where another task calls it as a function
        thread = Thread(target=copy_context().run, args=(inner, self))
        thread.start()
        thread.join()

    monkeypatch.setattr(kind, "__call__", in_a_thread)
    deliver(task)
    task()
    deliver(other)
    assert held == [True, False, False]


@pytest.mark.parametrize("option", ["lock_key", "lock_on_conflict"])
def test_a_callable_that_nobody_awaits_is_refused(app, option):
    """Its coroutine would be no key, and no strategy."""
    with pytest.raises(SettingsError, match="is not awaited"):

        @app.task(name="t", base=SingletonTask, **{option: coroutine})
        def task(): ...

        app.finalize()


def test_the_method_lock_for_is_no_option_but_a_value_of_that_name_is_refused(app):
    """Somebody means lock_at_least_for, and would lose the method; a method of one's own stays."""

    @app.task(base=SingletonTask, lock_key="k", lock_for=5)
    def export(): ...

    with pytest.raises(SettingsError, match="lock_for=5: no such option"):
        export.name  # noqa: B018 -- it is made now

    class Own(SingletonTask):
        abstract = True

        def lock_for(self, *args, **kwargs):
            return "mine"

    @app.task(base=Own, lock_key="k")
    def other(): ...

    assert other.lock_for() == "mine"
