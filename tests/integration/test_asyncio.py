"""Locks of asyncio tasks, on a real lock server."""

from __future__ import annotations

import asyncio

import pytest

from celery_dislock import (
    Dislock,
    LockHeldError,
    NotOwnerError,
    SettingsError,
    StoreError,
)
from celery_dislock.exceptions import LockTermsError


def test_tasks_exclude_each_other_and_a_task_does_not_exclude_itself(redis_url):
    inside, order = [], []

    async def body(lock):
        async with lock as lease:
            inside.append(lease)
            assert len(inside) == 1
            async with lock as again:
                assert again is lease
            await asyncio.sleep(0)
            order.append(lease.token)
            inside.clear()

    async def main():
        async with Dislock.from_url(redis_url) as dislock:
            lock = dislock.async_lock("k")
            await asyncio.gather(*(body(lock) for _ in range(20)))
            assert await lock.holders() == []
            assert lock.lease is None

    asyncio.run(main())
    assert order == sorted(set(order))
    assert len(order) == 20


def test_threads_and_tasks_stand_in_one_line(redis_url):
    async def main():
        async with Dislock.from_url(redis_url) as dislock:
            with pytest.raises(LockHeldError):
                async with dislock.async_lock("k", timeout=0.05):
                    pytest.fail("two have it")
            assert not await dislock.async_lock("k").try_acquire()
            with pytest.raises(SettingsError, match="use one"):
                await dislock.async_lock("k", on_lost="raise").acquire()

    with Dislock.from_url(redis_url) as other, other.lock("k"):
        asyncio.run(main())


def test_a_task_that_is_not_the_owner_is_told_who_is(redis_url):
    """Before Python 3.12 wait_for() takes the lock in a task of its own, which ends."""

    async def main():
        async with Dislock.from_url(redis_url) as dislock:
            lock = dislock.async_lock("k")
            assert await asyncio.create_task(lock.acquire(), name="another")
            with pytest.raises(NotOwnerError, match=r"not held here, but by .*, another on "):
                await lock.release()
            await asyncio.to_thread(dislock.lock_of("k").free)
            with pytest.raises(NotOwnerError, match=r"is not held$"):
                await lock.release()

    asyncio.run(main())


def test_a_task_of_asyncio_is_not_taken_for_one_of_celery(redis_url):
    async def main():
        dislock = Dislock.from_url(redis_url)
        async with dislock, dislock.async_lock("k", mode="shared"):
            with pytest.raises(LockTermsError, match="by this very asyncio task with mode"):
                await dislock.async_lock("k").try_acquire()

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [0.5, None])
def test_a_server_that_does_not_answer_is_given_up_in_time(own_redis_server, timeout):
    """Also after replies that came in time; without a time it is waited for."""
    options = {"socket_timeout": timeout}

    async def main():
        async with Dislock.from_url(own_redis_server.url, transport_options=options) as dislock:
            lock = dislock.async_lock("k")
            for _ in range(3):
                await lock.acquire()
                await lock.release()
            own_redis_server.pause()
            try:
                with pytest.raises(asyncio.TimeoutError if timeout is None else StoreError):
                    await asyncio.wait_for(lock.acquire(), 1.0 if timeout is None else 30.0)
            finally:
                own_redis_server.resume()

    asyncio.run(main())
