"""How those who hold a lock describe themselves to those who want it."""

import asyncio
import contextvars
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from celery_dislock import Dislock, LockHeldError, SingletonTask

KEY = "export:7"
TIMEOUT = 60.0  # seconds


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=redis_url)
    app.dislock = Dislock(app)
    yield app
    app.dislock.close()


def refused(app):
    """Return what somebody else is told who wants the lock, and what tools are told."""
    told = []
    lock = app.dislock.lock(KEY)
    thread = threading.Thread(target=lambda: told.append(lock.try_acquire()))
    thread.start()
    thread.join()
    (holder,) = lock.holders()
    return told[0].holder, holder


def assert_names_task(done, **more):
    """Check whom others were told of by a task that has ended; return what tools see."""
    worker, told, seen = done.get()
    here = {"worker": worker, "pid": os.getpid(), "host": socket.gethostname()}
    who = {"task": "shop.export", "id": done.id, **here}
    assert told == {**who, **more}
    assert {name: getattr(seen, name) for name in who} == who
    return seen


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_thread_says_its_name(app, is_renewed):
    """With its process; the timeout tells since when a renewal is overdue, if there are any."""
    with app.dislock.lock(KEY, **{"watchdog_timeout" if is_renewed else "expire": TIMEOUT}):
        told, seen = refused(app)
    here = {"worker": socket.gethostname(), "pid": os.getpid()}
    renewed = {"timeout": TIMEOUT} if is_renewed else {}
    assert told == {"thread": threading.current_thread().name, **here, **renewed}
    assert (seen.thread, seen.worker, seen.pid) == (told["thread"], here["worker"], here["pid"])
    assert (seen.task, seen.id, seen.renewed is not None) == (None, None, is_renewed)


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_task_says_its_id(app, is_renewed):
    """With its worker, and the process and host on which an operator finds it."""
    how = {"lock_watchdog_timeout" if is_renewed else "lock_expire": TIMEOUT}

    @app.task(base=SingletonTask, bind=True, lock_key=KEY, name="shop.export", shared=False, **how)
    def export(self):
        return self.request.hostname, *refused(app)

    seen = assert_names_task(export.apply(), **({"timeout": TIMEOUT} if is_renewed else {}))
    assert (seen.thread, seen.renewed is not None) == (None, is_renewed)


def lock_of(app, **options):
    """Return what others are told of a lock that is taken here."""
    with app.dislock.lock(KEY, **options):
        return refused(app)


async def lock_of_coroutine(app):
    """Return the same of a coroutine's."""
    async with app.dislock.async_lock(KEY):
        return refused(app)


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("where", ["body", "thread", "coroutine"])
def test_a_lock_that_a_body_takes_is_its_tasks(app, where, locked):
    """Whether the task has a lock_key or not; also in a thread that has the body's context."""

    def take(self):
        if where == "coroutine":
            return self.request.hostname, *asyncio.run(lock_of_coroutine(app))
        if where == "body" or not locked:
            return self.request.hostname, *lock_of(app)
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            return self.request.hostname, *pool.submit(context.run, lock_of, app).result()

    how = {"base": SingletonTask, "lock_key": "own"} if locked else {}
    task = app.task(take, bind=True, name="shop.export", shared=False, **how)
    done = task.apply()
    seen = assert_names_task(done, timeout=30.0)
    assert seen.owner.startswith(f"{done.id}:~")
    assert "thread" in lock_of(app)[0]


def test_a_body_may_hold_several_units_of_a_limit(app):
    """Two locks of one task are no copies of it."""

    def take():
        first, second = (app.dislock.lock(KEY, limit=2) for _ in range(2))
        context = contextvars.copy_context()
        with first, ThreadPoolExecutor(1) as pool:
            return bool(pool.submit(context.run, second.try_acquire).result())

    how = {"base": SingletonTask, "lock_key": "own", "name": "shop.export", "shared": False}
    assert app.task(take, **how).apply().get()


def test_a_view_that_is_refused_can_name_the_task(app):
    """The error has the conflict, also if this code would wait for itself."""

    def take():
        told = []

        def ask(locks=KEY):
            try:
                app.dislock.lock(locks, timeout=0).__enter__()
            except LockHeldError as exc:
                told.append(exc.conflict)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask([KEY, "other"])
        return [[one.key, one.holder["id"], bool(one.owner)] for one in told]

    how = {"base": SingletonTask, "lock_key": KEY, "name": "shop.export", "shared": False}
    done = app.task(take, **how).apply()
    assert done.get() == 2 * [[KEY, done.id, True]]
