"""Locks in plain Python, as the guide tells of them: by thread, by greenlet, and by process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import LockHeldError, LockLostError, NotOwnerError
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


def take_over(store, redis_client):
    """Take the lock away from its holder, as an operator's DEL and the next task do."""
    redis_client.delete(NAME)
    assert isinstance(store.acquire([NAME], "thief", LONG, HOLDER), Granted)


class TestReentry:
    def test_other_threads_are_refused(self, lock):
        """Another thread of the process is told which thread holds the lock, and for how long."""
        with lock:
            conflict = taken_elsewhere(lock)
            assert isinstance(conflict, Conflict)
            assert conflict.holder["thread"] == threading.current_thread().name
            assert 0 < conflict.remaining <= LONG
            assert elsewhere(lambda: lock.lease) is None

    def test_it_takes_as_many_releases(self, lock, redis_client):
        """The lock is free after as many releases as acquisitions, not before."""
        for _ in range(3):
            lock.acquire()
        for _ in range(2):
            lock.release()
            assert lock.locked()
        lock.release()
        assert redis_client.keys("*") == []

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

    def test_a_lost_lock_is_not_entered_again(self, lock, store, redis_client):
        """Re-entry of a lease that is known to be lost raises, and after release it starts anew."""
        lock.acquire()
        take_over(store, redis_client)
        with pytest.raises(LockLostError):
            lock.extend()
        with pytest.raises(LockLostError) as lost:
            lock.acquire()
        assert lost.value.key == KEY
        with pytest.raises(LockLostError):
            lock.release()
        assert isinstance(lock.try_acquire(), Conflict)
        store.release([NAME], "thief")
        assert lock.acquire(blocking=False)
        lock.release()


class TestOwnership:
    def test_several_keys_are_one_lock(self, dislock):
        """Its owner can take the same keys again, and meets itself at one of them alone."""
        with dislock.lock(["a", "b"]):
            assert dislock.lock(["a", "b"]).try_acquire()
            dislock.lock(["a", "b"]).release()
            assert isinstance(dislock.lock("a").try_acquire(), Conflict)

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

    @pytest.mark.parametrize("method", ["release", "extend"])
    def test_nobodys_lock_names_nobody(self, lock, method):
        """Release and extend of a free lock raise an error that says that nobody holds it."""
        with pytest.raises(NotOwnerError, match="nobody"):
            getattr(lock, method)()

    def test_extend_resets_the_expiry(self, lock, redis_client):
        """Extend renews the lease to its whole time."""
        with lock as lease:
            assert redis_client.pexpire(NAME, 5000)
            lock.extend()
            assert lease.renewals == 1
            assert redis_client.pttl(NAME) > LONG / 2 * 1000

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


class TestWith:
    def test_an_exception_releases(self, lock, redis_client):
        """An exception leaves the block, and the lock free."""
        with pytest.raises(ZeroDivisionError), lock:
            raise ZeroDivisionError
        assert redis_client.keys("*") == []


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
    def test_a_limit_admits_so_many(self, dislock, threads):
        """A lock with a limit admits so many threads, and not one more."""
        lock = dislock.lock(KEY, limit=2)
        with lock:
            done = threading.Event()
            held = threads.submit(lambda: (lock.acquire(), done.wait(PATIENCE), lock.release()))
            wait_for(lambda: len(lock.holders()) == 2)
            assert elsewhere(lock.acquire, blocking=False) is False
            done.set()
            held.result(PATIENCE)
            assert isinstance(taken_elsewhere(lock), Lease)

    def test_shared_leases_keep_an_exclusive_one_out(self, dislock):
        """Shared leases stand beside each other, and beside no exclusive one."""
        reader, writer = dislock.lock(KEY, mode="shared"), dislock.lock(KEY)
        with reader:
            assert isinstance(taken_elsewhere(reader), Lease)
            assert isinstance(taken_elsewhere(writer), Conflict)

    def test_a_waiting_writer_stops_later_readers(self, dislock, redis_client, threads):
        """A reader that comes after a waiting writer is refused, and served after it."""
        reader, writer = dislock.lock(KEY, mode="shared"), dislock.lock(KEY)
        order = []

        def take(lock, name):
            with lock:
                order.append(name)

        with reader:
            waiting = [threads.submit(take, writer, "writer")]
            wait_in_line(redis_client, 1)
            assert elsewhere(reader.acquire, blocking=False) is False
            waiting.append(threads.submit(take, reader, "reader"))
            wait_in_line(redis_client, 2)
        for future in waiting:
            future.result(PATIENCE)
        assert order == ["writer", "reader"]

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

    def test_a_place_whose_time_is_over_is_passed_over(self, store, redis_client):
        """A waiter that has not asked again in time is skipped at the hand-off."""
        store.acquire([NAME], "holder", LONG, HOLDER)
        store.acquire([NAME], "dead", LONG, HOLDER, place=0.05)
        store.acquire([NAME], "alive", LONG, HOLDER, place=LONG)
        time.sleep(0.1)
        store.release([NAME], "holder")
        assert [h.owner for h in store.holders(NAME)] == ["alive"]
        assert not redis_client.exists(LINE, f"{NAME}:places", f"{NAME}:wake:dead")

    def test_a_dead_head_holds_up_the_next_for_its_reservation_only(
        self, dislock, store, redis_client, threads
    ):
        """When the lock was handed to a dead waiter, the next one wakes as that lease runs out."""
        store.acquire([NAME], "holder", LONG, HOLDER)
        store.acquire([NAME], "dead", LONG, HOLDER, place=LONG)
        lock = dislock.lock(KEY)
        waiting = threads.submit(lambda: (lock.acquire(), lock.release()))
        wait_in_line(redis_client, 2)
        store.release([NAME], "holder")
        assert [h.owner for h in store.holders(NAME)] == ["dead"]
        wait_for(lambda: not store.holders(NAME) or waiting.done(), "the end of the reservation")
        wait_for(waiting.done, "its wake-up", within=PATIENCE / 3)  # far less than ASK_AGAIN

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


HOLD = """
import sys, time
from celery_dislock import Dislock
Dislock.from_url(sys.argv[1]).lock(sys.argv[2], watchdog_timeout=1).acquire()
print("ready", flush=True)
time.sleep(600)
"""

WAIT = """
import sys
from celery_dislock import Dislock
from celery_dislock.locks import lock as locks
locks.PLACE_TIMEOUT = 0.5
print("ready", flush=True)
Dislock.from_url(sys.argv[1]).lock(sys.argv[2]).acquire()
"""

GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
import gevent.event
from celery_dislock import Dislock

lock = Dislock.from_url(sys.argv[1]).lock(sys.argv[2])
order = []
done = gevent.event.Event()

def hold():
    with lock as lease:
        assert lock.try_acquire() is lease
        lock.release()
        done.wait()
        order.append("holder")

def wait(number):
    assert lock.lease is None
    assert not lock.acquire(blocking=False)
    with lock:
        order.append(number)

holder = gevent.spawn(hold)
while not lock.locked():
    gevent.sleep(0.005)
waiting = []
for number in range(3):
    waiting.append(gevent.spawn(wait, number))
    gevent.sleep(0.2)
done.set()
gevent.joinall([holder, *waiting], raise_error=True)
assert order == ["holder", 0, 1, 2], order
assert not lock.locked()
print("ready", flush=True)
"""


class TestProcesses:
    def test_a_killed_holder_is_followed_by_the_first_in_line(
        self, dislock, redis_url, redis_client, threads
    ):
        """When a holder was killed, the first in line has the lock once the lease has run out."""
        with another_process(HOLD, redis_url, KEY) as holder:
            lock = dislock.lock(KEY)
            waiting = threads.submit(lambda: (lock.acquire(timeout=PATIENCE), lock.release()))
            wait_in_line(redis_client, 1)
            holder.kill()
            assert waiting.result(2 * PATIENCE)[0] is True

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

    def test_the_owner_is_a_greenlet_under_gevent(self, redis_url):
        """Under gevent each greenlet is an owner of its own, and waits without stopping others."""
        pytest.importorskip("gevent")
        with another_process(GREENLETS, redis_url, KEY) as process:
            assert process.wait(PATIENCE) == 0


def server_ms(redis_client: redis.Redis) -> int:
    seconds, us = redis_client.time()
    return seconds * 1000 + us // 1000
