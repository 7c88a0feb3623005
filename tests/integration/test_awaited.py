"""Bodies that a pool awaits, many on one event loop, with their locks on a real server."""

import asyncio
import threading
from uuid import uuid4

import pytest
from celery import Celery
from celery.app.task import Context
from celery.signals import task_postrun, task_prerun

from celery_dislock import Dislock, current_lease
from celery_dislock.worker.awaiting import check_bodies
from tests.declaring import declare


class Awaiting:
    """A pool."""

    awaits_coroutines = True


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.dislock_url = redis_url
    check_bodies(app, Awaiting)
    return app


async def trace(task, *args, **headers):
    """Do what matters here of a tracer that awaits; the request is known from the context alone."""
    request = Context(
        {"id": uuid4().hex, "task": task.name, "hostname": "w1", "retries": 0, **headers},
        args=args,
        kwargs={},
        called_directly=False,
    )

    def tell(signal):
        task.request_stack.push(request)
        try:
            signal.send(sender=task, task_id=request.id, task=task, retval=None, state="SUCCESS")
        finally:
            task.request_stack.pop()

    tell(task_prerun)
    try:
        return await task(*args)
    finally:
        tell(task_postrun)


async def closing(app, main):
    async with Dislock(app):
        await main()


async def until(condition):
    """Wait for what another thread does."""
    for _ in range(1000):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited in vain")


def test_bodies_on_one_loop_have_a_lease_each(app):
    """Those of one key run one after the other, and the loop goes on while they wait."""
    inside = []

    async def body(self, key):
        lease = self.lease
        inside.append(key)
        assert inside.count(key) == 1
        await asyncio.sleep(0.02)
        assert self.lease is lease is current_lease()
        assert lease.key == f"k:{key}"
        lease.ensure_held()
        inside.remove(key)
        return lease.token

    task = declare(app, body, lock_key="k:<key>", lock_on_conflict="wait")

    async def main():
        tokens = await asyncio.gather(*(trace(task, key) for key in "ab" * 5))
        assert len(set(tokens)) == 10
        await until(lambda: not task.lock_for("a").holders())

    asyncio.run(closing(app, main))


@pytest.mark.parametrize("on_lost", ["warn", "raise"])
def test_a_body_that_is_cancelled_leaves_no_lock(app, on_lost):
    """The pool that has cancelled it hears of it; the next one runs."""
    started, ended = [], []

    async def body(self, key):
        started.append(self.lease)
        if len(started) == 1:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(self.lease.held)

    task = declare(app, body, lock_key="k:<key>", lock_on_lost=on_lost)

    async def main():
        first = asyncio.create_task(trace(task, "a"))
        await until(lambda: started)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert ended == [True]
        await until(lambda: not task.lock_for("a").holders())
        await trace(task, "a")

    asyncio.run(closing(app, main))
    assert len(started) == 2


def test_a_task_that_is_cancelled_while_it_waits_leaves_the_line(app):
    """Its body never runs, and whoever is behind it gets the lock."""
    started = []

    async def body(self, key, gate):
        started.append(gate)
        await gate.wait()

    task = declare(app, body, lock_key="k:<key>", lock_on_conflict="wait", lock_wait_timeout=60)

    async def main():
        gate, never = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(trace(task, "a", gate))
        await until(lambda: started)
        second = asyncio.create_task(trace(task, "a", never))
        handle = task.lock_for("a", gate)
        await until(handle.line)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        third = asyncio.create_task(trace(task, "a", gate))
        gate.set()
        await asyncio.gather(first, third)
        assert started == [gate, gate]

    asyncio.run(closing(app, main))


def test_a_limit_is_told_beside_the_event_loop(app):
    """A user's function may ask a database: others run meanwhile."""
    asked = []

    def limit_of(key):
        asked.append((key, threading.current_thread()))
        return 2

    async def body(self, key):
        return self.lease is not None, key

    task = declare(app, body, bind=True, lock_key="k:<key>", lock_limit=limit_of)

    async def main():
        assert await trace(task, "a") == (True, "a")

    asyncio.run(closing(app, main))
    [(key, thread)] = asked
    assert key == "a"
    assert thread is not threading.current_thread()
