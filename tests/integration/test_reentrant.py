"""Locks in plain Python, as the guide tells of them: by thread, by greenlet, and by process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask, current_lease
from celery_dislock.exceptions import LockHeldError, LockLostError
from celery_dislock.locks.lease import Conflict, Lease
from celery_dislock.servers.store import Store
from tests.holding import PATIENCE, name_of, wait_for

ROOT = Path(__file__).parents[2]
KEY = "export:7"
NAME = name_of(KEY)
LINE = f"{NAME}:line"
LONG = 60.0  # seconds: no lease of these tests runs out by itself
SHORT = 1.5  # seconds: renewed every half second
HOLDER = '{"task": "tests.other", "id": "o-1", "worker": "w", "pid": 1}'


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


def wait_in_line(redis_client, count):
    wait_for(lambda: redis_client.zcard(LINE) == count, f"a line of {count}")


class TestReentry:
    def test_another_dislock_of_the_process_is_another_owner(self, redis_url, lock):
        """Two of them in one thread, each with its first lock, are not taken for one another."""
        with Dislock.from_url(redis_url, watchdog_timeout=LONG) as theirs, lock:
            assert isinstance(theirs.lock(KEY).try_acquire(), Conflict)

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

    def test_tasks_take_the_very_same_lock(self, app, lock):
        """A task conflicts with a lock taken in Python, and Python with one that a task holds."""

        @app.task(base=SingletonTask, lock_key="export:<n>", lock_on_conflict="raise", shared=False)
        def export(n):
            return app.dislock.lock(f"export:{n}").holders()[0].task

        with lock:
            with pytest.raises(LockHeldError) as refused:
                export.apply(args=[7], throw=True)
            assert threading.current_thread().name in refused.value.holder
            assert export.apply(args=[8], throw=True).get() == export.name
        assert export.apply(args=[7], throw=True).get() == export.name


class TestWaiting:
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


class TestOwnExecution:
    """The lock of the task that runs here is the caller's: nobody waits for it."""

    def test_its_body_may_take_it(self, app, dislock, redis_client):
        """It is the same lease, and the block's end leaves it alone."""

        @app.task(base=SingletonTask, lock_key=KEY, shared=False)
        def task():
            with app.dislock.lock(KEY) as lease:
                assert lease is current_lease()
            assert app.dislock.lock(KEY).lease is lease
            return redis_client.exists(NAME)

        assert task.apply().get() == 1
        assert not redis_client.exists(NAME)


class TestLoss:
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


class TestEnds:
    def test_closing_ends_thread_and_connections(self, redis_url, redis_client):
        """Fifty that were used and closed leave nothing in this process, or on the server."""
        connections = len(redis_client.client_list())
        threads = threading.active_count()
        for _ in range(50):
            with Dislock.from_url(redis_url) as dislock, dislock.lock(KEY):
                pass
        gc.collect()
        wait_for(lambda: threading.active_count() <= threads, "the end of their threads")
        wait_for(lambda: len(redis_client.client_list()) <= connections, "their disconnection")

    def test_what_is_closed_can_be_used_again(self, redis_url):
        """It is made anew, its watchdog included."""
        dislock = Dislock.from_url(redis_url, watchdog_timeout=SHORT)
        lock = dislock.lock(KEY)
        for _ in range(2):
            with lock as lease:
                wait_for(lambda lease=lease: lease.renewals, "a renewal")
            dislock.close()

    def test_a_lock_released_and_taken_anew_in_its_block_ends_with_it(self, dislock, redis_client):
        """As threading's locks do: the block's end undoes the acquisition that there is."""
        lock = dislock.lock(KEY)
        with lock:
            lock.release()
            assert not redis_client.exists(NAME)
            lock.acquire()
        assert lock.lease is None
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


# How each of the libraries patches, starts a greenlet and waits for it.
LIBRARIES = {
    "gevent": """
import warnings
warnings.simplefilter("ignore")
from gevent import monkey, spawn, joinall, sleep
patch = monkey.patch_all
wait = lambda greenlets: joinall(greenlets, raise_error=True)
""",
    "eventlet": """
import eventlet
from eventlet import spawn, sleep
patch = eventlet.monkey_patch
wait = lambda greenlets: [one.wait() for one in greenlets]
""",
}
START = """
import sys
from celery_dislock import Dislock
start = lambda timeout: Dislock.from_url(sys.argv[1], watchdog_timeout=timeout)
def until(condition):
    while not condition():
        sleep(0.01)
"""

PATCHED_LATE = """
dislock = start(60)
with dislock.lock("before"):
    pass
{library}
patch()
inside, most = 0, 0
def body():
    global inside, most
    if dislock.lock("k").try_acquire():
        inside += 1
        most = max(most, inside)
        sleep(0.05)  # the others run meanwhile
        inside -= 1
        dislock.lock("k").release()
wait([spawn(body) for _ in range(50)])
print(most)
"""

HELD_WHILE_PATCHED = """
dislock = start(3)
held = dislock.lock("before")
held.acquire()
before = held.lease.renewals
{library}
patch()
other = dislock.lock("after")
other.acquire()
renewed = lambda: held.lease.renewals > before + 3 and other.lease.renewals > 3
until(lambda: renewed() or held.lease.lost or other.lease.lost)
print(held.lease.held, other.lease.held)
"""

COMPUTES = """
{library}
patch()
import logging, threading, time
from celery_dislock import signals
logging.basicConfig(level="INFO")
heard = []
@signals.lock_renewed.connect
def renewed(**_):
    heard.append(threading.get_ident())
@signals.lock_lost.connect
def lost(**_):
    sleep(0.01)  # a receiver may yield
    heard.append("lost")
dislock = start(1.5)
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
        until(lambda: len(heard) == lease.renewals)
        dislock.lock_of("k").free()
        compute(lambda: not lease.held)
        assert lease.lost
        until(lambda: heard[-1] == "lost")
def outer():
    try:
        body()
    except Exception as exc:
        print(type(exc).__name__)
wait([spawn(outer)])
dislock.close()
with dislock.lock("k"):  # goes on with another thread
    pass
dislock.close()
print("done")
"""

HIT_TWICE = """
{library}
patch()
from celery_dislock.servers.store import Store
dislock = start(60)
dislock.lock("export:7").acquire()
waiters = [spawn(dislock.lock("export:7").acquire) for _ in range(20)]
until(lambda: dislock.lock_of("export:7").state()[0].waiting == 20)
released = Store.release
def slowly(*args, **kwargs):
    sleep(1)  # so that the second exception strikes before the release is sent
    return released(*args, **kwargs)
Store.release = slowly
for _ in range(2):
    for waiter in waiters:
        waiter.kill(KeyError("hit"), block=False)
    sleep(0.1)  # each of them is hit, and goes on to its release
assert all(waiter.dead for waiter in waiters)
print("hit", flush=True)
sleep(600)  # until it is killed; its watchdog goes on
"""


@contextmanager
def program(text, library, url):
    """Run a program with greenlets of that library."""
    text = START + text.format(library=LIBRARIES[library])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", text, url],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("library", LIBRARIES)
class TestGreenlets:
    def test_a_body_that_computes_keeps_its_lock(self, redis_url, library):
        """The watchdog is a thread; what it reports is heard in the hub's, once that runs."""
        with program(COMPUTES, library, redis_url) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert out.split() == ["LockLostError", "done"], err
        assert "is lost" in err
        assert "Traceback" not in err

    def test_the_owner_is_the_greenlet_though_it_was_patched_late(self, redis_url, library):
        """Of fifty greenlets one is inside, and the log says that the patch came too late."""
        with program(PATCHED_LATE, library, redis_url) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert out.strip() == "1", err
        assert "patched this process after its first lock" in err

    def test_what_is_held_while_the_process_is_patched_is_renewed(self, redis_url, library):
        """So is what is taken after it; eventlet takes away a function that redis-py looks up."""
        with program(HELD_WHILE_PATCHED, library, redis_url) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert out.split() == ["True", "True"], err


def test_a_waiter_that_is_hit_twice_leaves_no_ghost(redis_url, redis_client):
    """What a second exception keeps from leaving the line is taken out by the watchdog."""
    with program(HIT_TWICE, "gevent", redis_url) as process:
        assert process.stdout.readline().strip() == "hit", process.stderr.read()
        wait_for(lambda: not redis_client.exists(f"{NAME}:line"), "the empty line")
        assert redis_client.hlen(NAME) == 1
