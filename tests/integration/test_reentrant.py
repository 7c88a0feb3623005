"""Locks in plain Python, as the guide tells of them: by thread, by greenlet, and by process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import LockHeldError, NotOwnerError
from celery_dislock.locks import lock as locks
from celery_dislock.locks.attempt import Conflict
from celery_dislock.locks.lease import Lease
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from tests.holding import PATIENCE, name_of, wait_for

if TYPE_CHECKING:
    import redis

ROOT = Path(__file__).parents[2]
PACKAGE = str(Path(locks.__file__).parent)
KEY = "export:7"
NAME = name_of(KEY)
LINE = f"{NAME}:line"
LONG = 60.0  # seconds: no lease of these tests runs out by itself
HOLDER = '{"task": "tests.other", "id": "o-1", "worker": "w", "pid": 1}'


@pytest.fixture
def dislock(redis_url):
    dislock = Dislock.from_url(redis_url, watchdog_timeout=LONG)
    yield dislock
    dislock.runtime.process.store.close()


@pytest.fixture
def lock(dislock):
    return dislock.lock(KEY)


@pytest.fixture
def store(redis_url):
    """Another process's way to the lock server."""
    store = Store(redis_url)
    yield store
    store.close()


@pytest.fixture
def threads():
    """Starts calls in threads of their own; all of them have ended when the test has."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        yield pool


def elsewhere(call, *args, **kwargs):
    """Call in another thread, and return what comes of it."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="elsewhere") as pool:
        return pool.submit(call, *args, **kwargs).result(PATIENCE)


def taken_elsewhere(lock):
    """Take the lock in another thread if it is free, and give it back."""

    def take():
        answer = lock.try_acquire()
        if isinstance(answer, Lease):
            lock.release()
        return answer

    return elsewhere(take)


def wait_in_line(redis_client, count):
    wait_for(lambda: redis_client.zcard(LINE) == count, f"a line of {count}")


class TestReentry:
    def test_other_threads_are_refused(self, lock):
        """Another thread of the process is told which thread holds the lock, and for how long."""
        with lock:
            conflict = taken_elsewhere(lock)
            assert isinstance(conflict, Conflict)
            assert conflict.holder["thread"] == threading.current_thread().name
            assert 0 < conflict.remaining <= LONG
            assert elsewhere(lambda: lock.lease) is None

    def test_another_dislock_of_the_process_is_another_owner(self, redis_url, lock):
        """Two of them in one thread, each with its first lock, are not taken for one another."""
        theirs = Dislock.from_url(redis_url, watchdog_timeout=LONG).lock(KEY)
        with lock:
            assert isinstance(theirs.try_acquire(), Conflict)

    def test_a_dead_threads_lock_is_not_the_next_threads(self, lock):
        """A thread that ends without release leaves its lock to no thread that comes after it."""

        def start(call):
            found = []
            thread = threading.Thread(target=lambda: found.append(call()))
            thread.start()
            thread.join()
            return found[0]

        lease = start(lock.try_acquire)
        assert isinstance(lease, Lease)
        for _ in range(10):  # the system gives the ids of threads that have ended to new ones
            assert isinstance(start(lock.try_acquire), Conflict)
        lease.release()


class TestOwnership:
    def test_a_writer_that_stops_writing_stays_a_writer(self, dislock, lock):
        """Until it has stopped to read, too."""
        lock.acquire()
        reader = dislock.lock(KEY, mode="shared")
        reader.acquire()
        lock.release()
        assert isinstance(elsewhere(dislock.lock(KEY, mode="shared").try_acquire), Conflict)
        reader.release()
        assert not lock.holders()

    @pytest.mark.parametrize("method", ["release", "extend"])
    def test_only_the_holder_may(self, lock, method):
        """Release and extend by another thread raise an error that names the holder."""
        with lock as lease:
            with pytest.raises(NotOwnerError) as refused:
                elsewhere(getattr(lock, method))
            assert refused.value.key == KEY
            assert threading.current_thread().name in refused.value.holder
            assert lock.lease is lease
            lease.ensure_held()
            assert lock.locked()

    def test_all_holders_are_told(self, dislock):
        """Holders tells of each lease its owner, remaining time, token, mode and holder."""
        shared = dislock.lock(KEY, mode="shared")
        assert not shared.locked()
        assert shared.holders() == []
        done, held = threading.Event(), threading.Event()

        def hold():
            with shared:
                held.set()
                done.wait(PATIENCE)

        with shared as lease, ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
            other = pool.submit(hold)
            held.wait(PATIENCE)
            found = {h.owner: h for h in shared.holders()}
            done.set()
            other.result(PATIENCE)
            assert len(found) == 2
            mine = found.pop(lease.owner)
            assert (mine.token, mine.mode) == (lease.token, "shared")
            assert (mine.thread, mine.pid) == (lease.holder["thread"], lease.holder["pid"])
            assert 0 < mine.remaining <= LONG
            assert (next(iter(found.values())).thread or "").startswith("beside")


class TestAsking:
    @pytest.mark.parametrize(
        "arguments", [{"blocking": False}, {"timeout": 0}, {"timeout": 0.05}], ids=str
    )
    def test_a_held_lock_is_not_got(self, lock, store, redis_client, arguments):
        """Who does not wait, or not for long, is told so, and leaves no trace in line."""
        store.acquire([NAME], "other", LONG, HOLDER)
        assert lock.acquire(**arguments) is False
        assert lock.lease is None
        assert redis_client.keys("*") == [NAME]
        assert redis_client.hkeys(NAME) == ["other"]


class TestKinds:
    def test_an_unfair_one_passes_those_who_wait(self, dislock, redis_client, threads):
        """With fair=False a newcomer passes those who wait, where the lock admits it."""
        reader, writer = dislock.lock(KEY, mode="shared"), dislock.lock(KEY)
        barging = dislock.lock(KEY, mode="shared", fair=False)
        with reader:
            waiting = threads.submit(lambda: (writer.acquire(), writer.release()))
            wait_in_line(redis_client, 1)
            assert elsewhere(lambda: (barging.acquire(blocking=False), barging.release())) == (
                True,
                None,
            )
        waiting.result(PATIENCE)

    def test_tasks_take_the_very_same_lock(self, redis_url):
        """A task conflicts with a lock taken in Python, and Python with one that a task holds."""
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.dislock_url = redis_url
        dislock = Dislock(app)
        lock = dislock.lock(KEY)

        @app.task(base=SingletonTask, lock_key="export:<n>", lock_on_conflict="raise")
        def export(n):
            conflict = dislock.lock(f"export:{n}").try_acquire()
            return conflict.holder["task"]

        try:
            with lock:
                with pytest.raises(LockHeldError) as refused:
                    export.apply(args=[7], throw=True)
                assert threading.current_thread().name in refused.value.holder
                assert export.apply(args=[8], throw=True).get() == export.name
            assert export.apply(args=[7], throw=True).get() == export.name
        finally:
            dislock.runtime.process.store.close()


class TestWaiting:
    def test_first_come_first_served(self, lock, redis_client, threads):
        """Threads that wait get the lock in the order in which they came, one at a time."""
        order, inside = [], []

        def take(number):
            with lock:
                inside.append(number)
                assert inside == [number]
                order.append(number)
                inside.remove(number)

        with lock:
            waiting = []
            for number in range(8):
                waiting.append(threads.submit(take, number))
                wait_in_line(redis_client, number + 1)
        for future in waiting:
            future.result(PATIENCE)
        assert order == list(range(8))
        wait_for(lambda: redis_client.keys("*") == [], "an empty database")

    def test_a_timeout_gives_up_the_place(self, lock, redis_client, threads):
        """A waiter whose timeout is over leaves the line, and those behind it move up."""
        with lock:
            impatient = threads.submit(lock.acquire, timeout=0.3)
            wait_in_line(redis_client, 1)
            patient = threads.submit(lambda: (lock.acquire(), lock.release()))
            assert impatient.result(PATIENCE) is False
            wait_in_line(redis_client, 1)
        patient.result(PATIENCE)
        wait_for(lambda: redis_client.keys("*") == [], "an empty database")

    def test_a_late_hand_off_is_passed_on(
        self, dislock, lock, store, redis_client, threads, monkeypatch
    ):
        """A waiter that is handed the lock while it gives up passes it to the next in line."""
        store.acquire([NAME], "other", LONG, HOLDER)
        own = dislock.runtime.process.store
        give_up = own.release
        handed = []

        def release(names, owner, *ending):
            if not handed:
                wait_in_line(redis_client, 2)
                assert store.release([NAME], "other")
                handed.append(redis_client.hkeys(NAME) == [owner])
            return give_up(names, owner, *ending)

        monkeypatch.setattr(own, "release", release)
        impatient = threads.submit(lock.acquire, timeout=0.2)
        wait_in_line(redis_client, 1)
        store.acquire([NAME], "next", LONG, HOLDER, place=LONG)
        assert impatient.result(PATIENCE) is False
        assert handed == [True]
        assert store.wait(NAME, "next", PATIENCE)
        assert [h.owner for h in store.holders(NAME)] == ["next"]

    def test_an_exception_leaves_no_ghost(self, lock, store, redis_client):
        """A waiter into which an exception is thrown leaves the line."""
        store.acquire([NAME], "other", LONG, HOLDER)
        with signalled(lambda: wait_in_line(redis_client, 1), raises=KeyboardInterrupt):
            lock.acquire()
        assert redis_client.keys("*") == [NAME]
        assert redis_client.hkeys(NAME) == ["other"]
        assert lock.lease is None

    def test_an_exception_beside_the_hand_off_passes_it_on(self, lock, store, redis_client):
        """A waiter into which an exception is thrown as it is handed the lock passes it on."""
        store.acquire([NAME], "other", LONG, HOLDER)

        def hand_over():
            wait_in_line(redis_client, 1)
            store.acquire([NAME], "next", LONG, HOLDER, place=LONG)

        with signalled(hand_over, lambda: store.release([NAME], "other"), raises=KeyboardInterrupt):
            lock.acquire()
        assert store.wait(NAME, "next", PATIENCE)
        assert [h.owner for h in store.holders(NAME)] == ["next"]
        assert not redis_client.exists(LINE)

    def test_a_hand_off_costs_the_same_however_many_wait(self, store, redis_client):
        """Release, wake-up and confirmation are as many commands with 20 waiters as with 2."""

        def cost(waiters):
            redis_client.flushdb()
            store.acquire([NAME], "holder", LONG, HOLDER)
            for number in range(waiters):
                store.acquire([NAME], f"w{number}", LONG, HOLDER, place=LONG)
            redis_client.config_resetstat()
            store.release([NAME], "holder")
            assert store.wait(NAME, "w0", PATIENCE)
            assert isinstance(store.acquire([NAME], "w0", LONG, HOLDER, place=LONG), Granted)
            stats = redis_client.info("commandstats")
            return sum(
                command["calls"]
                for name, command in stats.items()
                if not name.startswith(("cmdstat_info", "cmdstat_config"))
            )

        cost(1)  # the scripts are loaded now
        costs = {waiters: cost(waiters) for waiters in (1, 2, 20)}
        assert costs[1] <= costs[2] == costs[20] < 35, costs


@contextmanager
def signalled(wait, then=None, *, raises):
    """Expect *raises*, which a signal handler raises here after *wait* has returned in a thread."""

    def handler(_number, _frame):
        if then is not None:
            then()
        raise raises

    def send():
        wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send)
    try:
        with pytest.raises(raises):
            sender.start()
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def another_process(program, *arguments):
    """Run a program that says "ready" as its first line."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


WAIT = """
import sys
from celery_dislock import Dislock
from celery_dislock.locks import lock as locks
locks.PLACE_TIMEOUT = 0.5
print("ready", flush=True)
Dislock.from_url(sys.argv[1]).lock(sys.argv[2]).acquire()
"""


class TestProcesses:
    def test_a_killed_waiter_is_passed_over(self, lock, redis_url, redis_client, threads):
        """A waiter that was killed loses its place after a while, and the next one is served."""
        with lock:
            with another_process(WAIT, redis_url, KEY):
                wait_in_line(redis_client, 1)
                (dead,) = redis_client.zrange(LINE, 0, 0)
            waiting = threads.submit(lambda: (lock.acquire(timeout=PATIENCE), lock.release()))
            wait_in_line(redis_client, 2)
            deadline = int(redis_client.hget(f"{NAME}:places", dead).split()[1])
            wait_for(lambda: server_ms(redis_client) > deadline, "the end of its place")
        assert waiting.result(2 * PATIENCE)[0] is True


def server_ms(redis_client: redis.Redis) -> int:
    seconds, us = redis_client.time()
    return seconds * 1000 + us // 1000
