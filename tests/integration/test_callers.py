"""What a thread has of a lock already: taking it once more, losing it, and ending with it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask, current_lease, signals
from celery_dislock.exceptions import (
    LockHeldError,
    LockKeyError,
    LockLostError,
    LockTermsError,
    NotOwnerError,
    SettingsError,
)
from celery_dislock.locks.interruption import _MainThreadTarget
from tests.holding import PATIENCE, name_of, wait_for

ROOT = Path(__file__).parents[2]
KEY = "export:7"
NAME = name_of(KEY)
SHORT = 1.5  # seconds: renewed every half second
LONG = 60.0


@pytest.fixture
def dislock(redis_url):
    with Dislock.from_url(redis_url, watchdog_timeout=LONG) as dislock:
        yield dislock


@pytest.fixture
def app(redis_url):
    app = Celery("callers", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.dislock_url = redis_url
    app.conf.dislock_watchdog_timeout = LONG
    app.conf.task_store_eager_result = False
    app.dislock = Dislock(app)
    yield app
    app.dislock.close()


def elsewhere(call):
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result(PATIENCE)


def steal(redis_client):
    """Delete the lock, and let another owner have it."""
    redis_client.delete(NAME)
    redis_client.hset(NAME, "thief", "1 9999999999999 1 1 x {}")
    redis_client.pexpire(NAME, 60_000)


class TestTerms:
    @pytest.mark.parametrize(
        ("has", "asks", "named"),
        [
            ({"mode": "shared"}, {}, "mode='exclusive'"),
            ({"expire": 1}, {"expire": 60}, "expire=60.0"),
            ({"watchdog_timeout": 20}, {}, "watchdog_timeout=60.0"),
            ({}, {"on_lost": "raise"}, "on_lost='raise'"),
        ],
    )
    def test_other_terms_are_refused(self, dislock, redis_client, has, asks, named):
        """A lock that is held is not given once more on terms that it does not have."""
        with dislock.lock(KEY, **has) as lease:
            with pytest.raises(LockTermsError, match=named) as refused, dislock.lock(KEY, **asks):
                pass
            assert refused.value.key == KEY
            assert "thread" in str(refused.value)
            assert lease.held
        assert not redis_client.exists(NAME)

    def test_an_upgrade_is_refused_without_a_question(self, dislock):
        """Neither a wait nor a try: the reader would wait for itself, or seem to have the lock."""
        reader, writer = dislock.lock(KEY, mode="shared"), dislock.lock(KEY)
        with reader:
            for ask in (writer.acquire, writer.try_acquire, lambda: writer.acquire(timeout=5)):
                with pytest.raises(LockTermsError, match="shared"):
                    ask()

    def test_a_downgrade_is_granted(self, dislock, redis_client):
        """Who is alone may read as well; the lock is free when both have ended."""
        with dislock.lock(KEY) as alone:
            with dislock.lock(KEY, mode="shared") as also:
                assert also is alone
            assert redis_client.exists(NAME)
        assert not redis_client.exists(NAME)

    def test_the_same_terms_are_granted_again(self, dislock):
        """From any object for the key, and written in any way."""
        with dislock.lock(KEY, limit=3, max_renew_times=7) as lease:
            assert dislock.lock([KEY], limit=3, max_renew_times=7).try_acquire() is lease
            dislock.lock(KEY, limit=3, max_renew_times=7).release()


class TestOwnExecution:
    """The lock of the task that runs here is the caller's: nobody waits for it."""

    def run(self, app, body, **options):
        @app.task(base=SingletonTask, lock_key=KEY, shared=False, **options)
        def task():
            return body()

        return task.apply()

    def test_its_body_may_take_it(self, app, dislock, redis_client):
        """It is the same lease, and the block's end leaves it alone."""

        def body():
            with app.dislock.lock(KEY) as lease:
                assert lease is current_lease()
            assert app.dislock.lock(KEY).lease is lease
            return redis_client.exists(NAME)

        assert self.run(app, body).get() == 1
        assert not redis_client.exists(NAME)

    def test_its_body_need_not_repeat_how_long_it_lasts(self, app):
        """The task's own timeout and cap hold for a block that states none."""

        def body():
            with app.dislock.lock(KEY) as lease:
                return lease is current_lease()

        assert self.run(app, body, lock_watchdog_timeout=20, max_renew_times=7).get() is True

    def test_its_body_cannot_release_it(self, app):
        """What the body did not take it cannot give away."""

        def body():
            with pytest.raises(NotOwnerError):
                app.dislock.lock(KEY).release()
            return current_lease().held

        assert self.run(app, body).get() is True

    def test_other_terms_are_refused(self, app):
        """The error names the task, and what differs."""

        def body():
            with app.dislock.lock(KEY, watchdog_timeout=5):
                pass

        result = self.run(app, body)
        assert isinstance(result.result, LockTermsError)
        assert "watchdog_timeout=60.0" in str(result.result)

    def waiting(self, app):
        """Declare a task that waits for the lock for an hour."""
        options = {"lock_key": KEY, "lock_on_conflict": "wait", "lock_wait_timeout": 3600}

        @app.task(base=SingletonTask, shared=False, **options)
        def waits():
            """Never run."""

        return waits

    def test_an_eager_task_that_would_wait_for_it_fails_at_once(self, app):
        """Wait, inside the very task that holds the lock is an error, not a wait."""
        inner = self.waiting(app)
        result = self.run(app, lambda: inner.apply().result)
        assert isinstance(result.get(), LockHeldError)

    def test_an_eager_task_in_a_block_of_its_lock_fails_at_once(self, app):
        """The other way round: the block has the lock that the task would wait for."""
        task = self.waiting(app)
        with app.dislock.lock(KEY):
            assert isinstance(task.apply().result, LockHeldError)
        assert task.apply().successful()

    def test_a_block_in_a_body_that_can_be_stopped_arms_nothing_of_its_own(self, app):
        """The task is stopped as it asks; nothing stays armed when its body has ended."""

        def body():
            with app.dislock.lock(KEY, on_lost="raise") as lease:
                return lease.held

        assert self.run(app, body, lock_on_lost="raise").get() is True
        assert not _MainThreadTarget.armed

    def test_another_dislock_of_the_server_does_not_wait_either(self, app, dislock):
        """Two Dislock objects share nothing but the server: still nobody waits for itself."""

        def body():
            with pytest.raises(LockHeldError), dislock.lock(KEY):
                pass
            return True

        assert self.run(app, body).get() is True


class TestLoss:
    def test_a_block_whose_lock_was_taken_ends_with_an_error(self, dislock, redis_client):
        """Deleted and taken by another, unnoticed until the end."""
        released = []

        def receiver(lease, **_):
            released.append(lease)

        signals.lock_released.connect(receiver)
        with pytest.raises(LockLostError) as lost, dislock.lock(KEY):
            steal(redis_client)
        assert lost.value.key == KEY
        assert released == []
        assert redis_client.hkeys(NAME) == ["thief"]

    def test_a_block_whose_lock_ran_out_ends_with_an_error(self, dislock, redis_client):
        """A fixed expiry that is over before the block is."""
        with pytest.raises(LockLostError), dislock.lock(KEY, expire=0.2):
            wait_for(lambda: not redis_client.exists(NAME), "the expiry")

    def test_a_block_that_outlived_its_cap_ends_with_an_error(self, redis_url, redis_client):
        """The cap was told when it was reached; that the lock ran out then is told at the end."""
        with (
            Dislock.from_url(redis_url, watchdog_timeout=SHORT) as dislock,
            pytest.raises(LockLostError, match="its cap"),
            dislock.lock(KEY, max_renew_times=1),
        ):
            wait_for(lambda: not redis_client.exists(NAME), "the expiry")

    def test_release_says_so_too(self, dislock, redis_client, caplog):
        """As the block does; and the thread is not barred from the lock."""
        lock = dislock.lock(KEY)
        lock.acquire()
        redis_client.delete(NAME)
        with pytest.raises(LockLostError):
            lock.release()
        assert "is lost" in caplog.text
        assert lock.acquire(blocking=False)
        lock.release()

    def test_the_outermost_block_tells(self, dislock, redis_client):
        """An inner block has nothing to release, and asks nobody."""
        done = []
        with pytest.raises(LockLostError), dislock.lock(KEY):
            with dislock.lock(KEY):
                redis_client.delete(NAME)
            done.append("inner")
        assert done == ["inner"]

    @pytest.mark.parametrize("way", ["block", "release"])
    def test_an_inner_end_tells_of_a_loss_that_is_known(self, redis_url, redis_client, way):
        """What follows in the outer block does not run without the lock."""
        done = []
        with Dislock.from_url(redis_url, watchdog_timeout=SHORT) as dislock:
            lock = dislock.lock(KEY)
            with pytest.raises(LockLostError), lock as lease, ExitStack() as stack:
                if way == "block":
                    stack.enter_context(lock)
                else:
                    lock.acquire()
                    stack.callback(lock.release)
                redis_client.delete(NAME)
                wait_for(lambda: lease.lost, "the loss")
                stack.close()
                done.append("after")
            assert done == []
            assert lock.lease is None

    @pytest.mark.parametrize("thread", ["main", "other"])
    def test_a_block_can_be_stopped(self, redis_url, redis_client, thread):
        """With on_lost="raise" the body does not go on without its lock."""

        def hold():
            with dislock.lock(KEY, on_lost="raise"):
                steal(redis_client)
                wait_for(lambda: False, "the interruption")

        with Dislock.from_url(redis_url, watchdog_timeout=SHORT) as dislock:
            call = hold if thread == "main" else lambda: elsewhere(hold)
            with pytest.raises(LockLostError):
                call()
        assert redis_client.hkeys(NAME) == ["thief"]


class TestEventLoop:
    def test_a_thread_of_the_loop_may(self, dislock):
        """As the error says: a function of its own, in a thread."""

        def whole_block():
            with dislock.lock(KEY) as lease:
                return lease.held

        async def coroutine():
            return await asyncio.to_thread(whole_block)

        assert asyncio.run(coroutine()) is True


class TestEnds:
    def test_a_lock_whose_thread_has_ended_is_renewed_no_more(
        self, redis_url, redis_client, caplog
    ):
        """Nobody is left to release it: the log says so, and it ends with its expiry."""
        with Dislock.from_url(redis_url, watchdog_timeout=SHORT) as dislock:
            thread = threading.Thread(target=dislock.lock(KEY).acquire, name="short-lived")
            thread.start()
            thread.join()
            wait_for(lambda: not redis_client.exists(NAME), "the expiry")
            wait_for(lambda: len(dislock.runtime.process.watchdog) == 0, "the watchdog")
        (line,) = [r.getMessage() for r in caplog.records if "renewed no more" in r.getMessage()]
        assert "short-lived" in line
        assert KEY in line

    def test_closing_ends_thread_and_connections(self, redis_url, redis_client):
        """Fifty that were used and closed leave nothing in this process, or on the server."""
        connections = len(redis_client.client_list())
        threads = threading.active_count()
        for _ in range(50):
            with Dislock.from_url(redis_url) as dislock, dislock.lock(KEY):
                pass
        gc.collect()
        assert threading.active_count() == threads
        wait_for(lambda: len(redis_client.client_list()) <= connections, "their disconnection")

    def test_what_is_closed_can_be_used_again(self, redis_url):
        """It is made anew, its watchdog included."""
        dislock = Dislock.from_url(redis_url, watchdog_timeout=SHORT)
        for _ in range(2):
            with dislock.lock(KEY) as lease:
                wait_for(lambda lease=lease: lease.renewals, "a renewal")
            dislock.close()

    def test_closing_with_a_lock_says_so(self, dislock, redis_client, caplog):
        """The lock is renewed no more, and the log says it; it can be released all the same."""
        lock = dislock.lock(KEY)
        lock.acquire()
        lease = lock.lease
        dislock.close()
        assert "Closed while this process held 1 lock(s)" in caplog.text
        lease.release()
        assert not redis_client.exists(NAME)

    @pytest.mark.parametrize("way", ["release", "block", "stack"])
    def test_what_was_taken_before_closing_can_be_released(self, dislock, redis_client, way):
        """The thread is still the owner: its lock is found, and ends when it is released."""
        lock = dislock.lock(KEY)
        with ExitStack() as stack:
            if way == "release":
                lock.acquire()
                stack.callback(lock.release)
            elif way == "block":
                stack.push(lock.__exit__)
                lock.__enter__()
            else:
                stack.enter_context(lock)
            dislock.close()
            assert lock.lease is not None
            assert lock.lease.held
        assert not redis_client.exists(NAME)
        assert lock.lease is None

    def test_a_lock_released_and_taken_anew_in_its_block_ends_with_it(self, dislock, redis_client):
        """As threading's locks do: the block's end undoes the acquisition that there is."""
        lock = dislock.lock(KEY)
        with lock:
            lock.release()
            assert not redis_client.exists(NAME)
            lock.acquire()
        assert lock.lease is None
        assert not redis_client.exists(NAME)

    def test_an_exit_stack_may_hold_it(self, dislock, redis_client):
        """Blocks of other kinds than a with statement enter and leave as it does."""
        with ExitStack() as stack:
            stack.enter_context(dislock.lock(KEY))
            stack.enter_context(dislock.lock(KEY))
            assert redis_client.exists(NAME)
        assert not redis_client.exists(NAME)

    def test_a_block_that_is_left_by_another_way_is_released(self, dislock, redis_client):
        """A generator that is dropped in the middle of its block holds nothing afterwards."""

        def generator():
            with dislock.lock(KEY):
                yield

        running = generator()
        next(running)
        del running
        gc.collect()
        assert not redis_client.exists(NAME)


class TestForks:
    def test_a_copy_of_a_lease_is_not_held(self, dislock, redis_client):
        """In the child it says so, and its release leaves the parent's lease alone."""
        with dislock.lock(KEY) as lease:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    lease.release()
                    os.write(write, f"{lease.held} {lease.remaining}".encode())
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            assert os.read(read, 100) == b"False 0.0"
            os.close(read)
            os.close(write)
            assert redis_client.exists(NAME)
            assert lease.held

    def test_the_childs_own_exception_is_not_hidden(self, dislock, redis_client):
        """A child that leaves the block by an exception leaves it by that one."""
        read, write = os.pipe()
        pid = -1
        try:
            with dislock.lock(KEY):
                pid = os.fork()
                if pid == 0:
                    raise ZeroDivisionError  # noqa: TRY301 -- in the child
        except BaseException as exc:
            if pid == 0:
                os.write(write, type(exc).__name__.encode())
                os._exit(0)
            raise
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"ZeroDivisionError"
        os.close(read)
        os.close(write)


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ("limi", "limit"),
            ("lock_mode", "mode"),
            ("time_out", "timeout"),
            ("max_renew_time", "max_renew_times"),
        ],
    )
    def test_a_near_miss_is_suggested(self, dislock, given, meant):
        """An unknown option is an error that says what was meant."""
        with pytest.raises(SettingsError, match=f"did you mean '{meant}'") as refused:
            dislock.lock(KEY, **{given: 1})
        assert refused.value.option == given

    @pytest.mark.parametrize("given", ["ttl", "shared", "blocking"])
    def test_an_unknown_one_is_refused(self, dislock, given):
        """Nothing is accepted in silence."""
        with pytest.raises(SettingsError, match="no such option"):
            dislock.lock(KEY, **{given: 1})

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("timeout", float("nan")),
            ("timeout", -1),
            ("timeout", "5"),
            ("timeout", 10**400),
            ("fair", "no"),
            ("limit", 0),
            ("mode", "sharde"),
            ("expire", float("inf")),
            ("expire", 1e300),
            ("watchdog_timeout", 1e12),
            ("on_lost", "terminate"),
        ],
    )
    def test_a_bad_value_is_named(self, dislock, option, value):
        """As it was written: the lock, the option, the value."""
        with pytest.raises(SettingsError) as refused:
            dislock.lock(KEY, **{option: value})
        assert refused.value.option == option

    def test_a_wait_may_be_a_timedelta(self, dislock):
        """As it may for the block."""
        assert dislock.lock(KEY).acquire(timeout=timedelta(seconds=1))
        dislock.lock(KEY).release()

    @pytest.mark.parametrize("key", [5, b"export:7", None, ["a", 5], "", []])
    def test_what_is_no_key_is_refused(self, dislock, key):
        """With an error of ours."""
        with pytest.raises(LockKeyError):
            dislock.lock(key)


PATCHED_LATE = """
import sys
from celery_dislock import Dislock
dislock = Dislock.from_url(sys.argv[1], watchdog_timeout=60)
with dislock.lock("before"):
    pass
if sys.argv[2] == "gevent":
    import warnings
    warnings.simplefilter("ignore")
    from gevent import monkey, spawn, joinall, sleep
    monkey.patch_all()
    start = lambda call: spawn(call)
    wait = joinall
else:
    import eventlet
    eventlet.monkey_patch()
    from eventlet import spawn, sleep
    start, wait = spawn, lambda all: [one.wait() for one in all]
inside, most = 0, 0
def body():
    global inside, most
    if dislock.lock("k").try_acquire():
        inside += 1
        most = max(most, inside)
        sleep(0.05)
        inside -= 1
        dislock.lock("k").release()
wait([start(body) for _ in range(50)])
print(most)
"""


HELD_WHILE_PATCHED = """
import sys
from celery_dislock import Dislock
dislock = Dislock.from_url(sys.argv[1], watchdog_timeout=3)
held = dislock.lock("before")
held.acquire()
before = held.lease.renewals
if sys.argv[2] == "gevent":
    import warnings
    warnings.simplefilter("ignore")
    from gevent import monkey, sleep
    monkey.patch_all()
else:
    import eventlet
    eventlet.monkey_patch()
    from eventlet import sleep
other = dislock.lock("after")
other.acquire()
while not (held.lease.lost or other.lease.lost):
    if held.lease.renewals > before + 3 and other.lease.renewals > 3:
        break
    sleep(0.05)
print(held.lease.held, other.lease.held)
"""


HIT_TWICE = """
from gevent import monkey
monkey.patch_all()
import sys, gevent
from celery_dislock import Dislock
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.servers.store import Store
dislock = Dislock.from_url(sys.argv[1], watchdog_timeout=60)
dislock.lock("export:7").acquire()
waiters = [gevent.spawn(dislock.lock("export:7").acquire) for _ in range(20)]
server = dislock.runtime.process.store.lock_server
while server.send("ZCARD", "dislock:{export:7}:line") < 20:
    gevent.sleep(0.01)
released = Store.release
def slowly(*args, **kwargs):
    gevent.sleep(1)  # so that the second exception strikes before the release is sent
    return released(*args, **kwargs)
Store.release = slowly
for _ in range(2):
    for waiter in waiters:
        waiter.kill(KeyError("hit"), block=False)
    gevent.sleep(0.1)
assert all(waiter.dead for waiter in waiters)
print("hit", flush=True)
gevent.sleep(600)  # its watchdog goes on
"""


COMPUTES = """
import sys
if sys.argv[2] == "gevent":
    from gevent import monkey, spawn, joinall, sleep
    monkey.patch_all()
    start, wait = spawn, lambda one: joinall([one], raise_error=True)
else:
    import eventlet
    eventlet.monkey_patch()
    from eventlet import spawn, sleep
    start, wait = spawn, lambda one: one.wait()
import logging, threading, time
from celery_dislock import Dislock, signals
logging.basicConfig(level="INFO")
heard = []
@signals.lock_renewed.connect
def renewed(**_):
    heard.append(threading.get_ident())
@signals.lock_lost.connect
def lost(**_):
    sleep(0.01)  # a receiver may yield
    heard.append("lost")
dislock = Dislock.from_url(sys.argv[1], watchdog_timeout=1.5)
def compute(until):
    while not until():
        sum(range(1000))
def body():
    with dislock.lock("k") as lease:
        began = time.monotonic()
        compute(lambda: time.monotonic() > began + 4.5)
        lease.ensure_held()
        assert lease.renewals > 6, lease.renewals
        assert not heard  # told when the body yields
        sleep(0.1)
        assert len(heard) == lease.renewals, heard
        assert set(heard) <= {threading.main_thread().ident, *heard}
        dislock.runtime.process.store.lock_server.send("DEL", "dislock:{k}")
        compute(lambda: not lease.held)
        assert lease.lost
        sleep(0.1)
        assert heard[-1] == "lost"
def outer():
    try:
        body()
    except Exception as exc:
        print(type(exc).__name__)
wait(start(outer))
dislock.close()
with dislock.lock("k"):  # goes on with another thread
    pass
dislock.close()
print("done")
"""


class TestGreenlets:
    @pytest.mark.parametrize("library", ["gevent", "eventlet"])
    def test_a_body_that_computes_keeps_its_lock(self, redis_url, library):
        """The watchdog is a thread; what it reports is heard in the hub's, once that runs."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", COMPUTES, redis_url, library],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stdout.split() == ["LockLostError", "done"], done.stderr
        assert "is lost" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("library", ["gevent", "eventlet"])
    def test_the_owner_is_the_greenlet_though_it_was_patched_late(self, redis_url, library):
        """Of fifty greenlets one is inside, and the log says that the patch came too late."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PATCHED_LATE, redis_url, library],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stdout.strip() == "1", done.stderr
        assert "patched this process after its first lock" in done.stderr

    @pytest.mark.parametrize("library", ["gevent", "eventlet"])
    def test_what_is_held_while_the_process_is_patched_is_renewed(self, redis_url, library):
        """So is what is taken after it; eventlet takes away a function that redis-py looks up."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HELD_WHILE_PATCHED, redis_url, library],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stdout.split() == ["True", "True"], done.stderr

    def test_a_waiter_that_is_hit_twice_leaves_no_ghost(self, redis_url, redis_client):
        """What a second exception keeps from leaving the line is taken out by the watchdog."""
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HIT_TWICE, redis_url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout.readline().strip() == "hit", process.stderr.read()
                wait_for(lambda: not redis_client.exists(f"{NAME}:line"), "the empty line")
                assert redis_client.hlen(NAME) == 1
            finally:
                process.kill()
