"""Blocking code on an event loop: what it waits for, what it raises, and what ends it."""

import asyncio
import contextvars
from contextlib import suppress

import greenlet
import pytest

from celery_dislock.servers import bridge
from celery_dislock.servers.bridge import current_call, run_at_once, run_on_loop, wait_for

variable = contextvars.ContextVar("variable", default="none")


async def soon(value=None, error=None):
    """Return or raise in the loop's next round."""
    await asyncio.sleep(0)
    if error is not None:
        raise error
    return value


def test_code_waits_and_gets_what_it_has_waited_for():
    def add(one, *, two):
        return wait_for(soon(one)) + wait_for(soon(two))

    assert asyncio.run(run_on_loop(add, 1, two=2)) == 3


def test_errors_pass_in_both_directions():
    def fail():
        with pytest.raises(OSError, match="away"):
            wait_for(soon(error=OSError("away")))
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(run_on_loop(fail))


def test_the_event_loop_goes_on_while_code_waits():
    order = []

    def work(name):
        for n in range(2):
            order.append((name, n))
            bridge.sleep(0)

    async def both():
        await asyncio.gather(run_on_loop(work, "a"), run_on_loop(work, "b"))

    asyncio.run(both())
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_code_knows_its_task_loop_and_context():
    async def main():
        variable.set("mine")
        call, value = await run_on_loop(lambda: (current_call(), variable.get()))
        assert (call.task, call.loop) == (asyncio.current_task(), asyncio.get_running_loop())
        assert value == "mine"
        assert await run_on_loop(lambda: variable.set("theirs")) is not None
        assert variable.get() == "theirs"
        assert run_at_once(variable.get) == "theirs"

    assert current_call() is None
    asyncio.run(main())


@pytest.mark.parametrize("kind", [asyncio.CancelledError, greenlet.GreenletExit, SystemExit])
def test_a_call_that_is_stopped_is_told_and_waits_no_more(kind):
    """Each further attempt to wait raises what has stopped it."""
    told = []

    def work():
        for waits_for in (soon(error=kind("stopped")), soon(), asyncio.sleep(3600)):
            with pytest.raises(kind) as caught:
                wait_for(waits_for)
            told.append(caught.value)

    asyncio.run(run_on_loop(work))
    assert len(told) == 3
    assert len(set(map(id, told))) == 1


def test_a_cancelled_task_ends_as_cancelled():
    """The call cannot wait in its own clean-up."""
    waits = []

    def work():
        try:
            wait_for(asyncio.sleep(3600))
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                wait_for(waits.append("never") or soon())
            wait_for(soon())

    async def main():
        task = asyncio.create_task(run_on_loop(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_coroutine_that_is_dropped_ends_its_code():
    ended = []

    def work():
        try:
            wait_for(soon())
        finally:
            ended.append(True)
            wait_for(soon())

    async def main():
        coroutine = run_on_loop(work)
        coroutine.send(None)
        coroutine.close()

    asyncio.run(main())
    assert ended == [True]


def test_calls_after_one_that_failed_are_new_ones():
    async def main():
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await run_on_loop(lambda: 1 / 0)
            assert await run_on_loop(lambda: wait_for(soon("well"))) == "well"

    asyncio.run(main())


def test_code_outside_of_a_call_cannot_wait_for_an_event_loop():
    with pytest.raises(ConnectionError, match="belongs to an event loop"):
        wait_for(soon())
    coroutine = run_on_loop(lambda: None)
    with pytest.raises(RuntimeError, match="tasks of asyncio"):
        coroutine.send(None)


def test_greenlet_is_an_extra(monkeypatch):
    monkeypatch.setattr("celery_dislock.servers.bridge.greenlet", None)
    with pytest.raises(ImportError, match=r"pip install 'celery-dislock\[asyncio\]'"):
        bridge.require_greenlet()
