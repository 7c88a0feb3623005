"""Locks in programs with greenlets: who is the owner, and what goes on beside the hub."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.holding import PATIENCE, name_of, wait_for

ROOT = Path(__file__).parents[2]

# How each of the libraries patches, starts a greenlet and waits for it, and runs a job in its pool
# of threads, which has one.
LIBRARIES = {
    "gevent": """
import warnings
warnings.simplefilter("ignore")
from gevent import get_hub, monkey, spawn, joinall, sleep
patch = monkey.patch_all
wait = lambda greenlets: joinall(greenlets, raise_error=True)
job = lambda call, *args: get_hub().threadpool.apply(call, args)
get_hub().threadpool.maxsize = 1
""",
    "eventlet": """
import eventlet
from eventlet import spawn, sleep, tpool
patch = eventlet.monkey_patch
wait = lambda greenlets: [one.wait() for one in greenlets]
tpool.set_num_threads(1)
job = tpool.execute
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
dislock.lock("k").acquire()
waiters = [spawn(dislock.lock("k").acquire) for _ in range(20)]
until(lambda: dislock.lock_of("k").state()[0].waiting == 20)
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

POOLS = """
{library}
dislock = start(60)
def take():
    return bool(dislock.lock("k").try_acquire())
def twice():
    with dislock.lock("k", timeout=0) as lease:
        return dislock.lock("k").try_acquire() is lease
lock = dislock.lock("k")
told = [job(lock.acquire), job(take)]
lock.release()
told.append(job(twice))
print(*told)
"""

GREENLETS = """
{library}
patch()
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
dislock = start(60)
most = inside = 0
def body(executor):
    global inside, most
    lock = dislock.lock("k")
    def enter():
        with lock:
            yield
    generator = enter()
    executor.submit(next, generator).result()
    inside += 1
    most = max(most, inside)
    with dislock.lock("another"):
        sleep(0.002)
    inside -= 1
    executor.submit(generator.close).result()
with ThreadPoolExecutor(24) as executor:
    wait([spawn(body, executor) for _ in range(12)])
print(most)
"""


OWNERS = """
{library}
patch()
dislock = start(1.5)
def lives():
    dislock.lock("lives").acquire()
    until(lambda: dislock.lock("lives").lease.renewals > 2)
    dislock.lock("lives").release()
def ends():
    dislock.lock("ends").acquire()
wait([spawn(lives), spawn(ends)])
until(lambda: dislock.lock("ends").try_acquire())
print("free")
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


@pytest.fixture(params=LIBRARIES)
def run(request, redis_url):
    """Run a program to its end; return what it has printed, and its log."""

    def run(text):
        with program(text, request.param, redis_url) as process:
            return process.communicate(timeout=PATIENCE)

    return run


@pytest.mark.extra
def test_a_body_that_computes_keeps_its_lock(run):
    """The watchdog is a thread; what it reports is heard in the hub's, once that runs."""
    out, err = run(COMPUTES)
    assert out.split() == ["LockLostError", "done"], err
    assert "is lost" in err
    assert "Traceback" not in err


@pytest.mark.extra
def test_the_owner_is_the_greenlet_though_it_was_patched_late(run):
    """Of fifty greenlets one is inside, and the log says that the patch came too late."""
    out, err = run(PATCHED_LATE)
    assert out.strip() == "1", err
    assert "patched this process after its first lock" in err


@pytest.mark.extra
def test_what_is_held_while_the_process_is_patched_is_renewed(run):
    """So is what is taken after it; eventlet takes away a function that redis-py looks up."""
    out, err = run(HELD_WHILE_PATCHED)
    assert out.split() == ["True", "True"], err


def test_a_lease_is_renewed_for_as_long_as_its_greenlet_lives(run):
    """Nobody else can release it."""
    out, err = run(OWNERS)
    assert out.strip() == "free", err


@pytest.mark.extra
def test_jobs_of_its_pool_of_threads_exclude_each_other(run):
    """The second is refused; a block in the block of one job has its lease."""
    out, err = run(POOLS)
    assert out.strip() == "True False True", err


@pytest.mark.extra
def test_blocks_that_begin_and_end_in_any_greenlet_exclude_each_other(run):
    """At most one is inside, whichever greenlet has begun or ended a block."""
    out, err = run(GREENLETS)
    assert out.strip() == "1", err


def test_a_waiter_that_is_hit_twice_leaves_no_ghost(redis_url, redis_client):
    """What a second exception keeps from leaving the line is taken out by the watchdog."""
    with program(HIT_TWICE, "gevent", redis_url) as process:
        assert process.stdout.readline().strip() == "hit", process.stderr.read()
        wait_for(lambda: not redis_client.exists(f"{name_of('k')}:line"), "the empty line")
        assert redis_client.hlen(name_of("k")) == 1
