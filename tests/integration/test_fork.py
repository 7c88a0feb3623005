"""A process that forks with a lease held: what is whose afterwards.

Each scene runs in an interpreter of its own, so that no fork happens inside the test run.
"""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from celery_dislock import Dislock, Lease
from tests.holding import PATIENCE, wait_for
from tests.pace import LEASE
from tests.programs import run

ROOT = Path(__file__).parents[2]


def act(scene, url):
    """Play a scene in a new interpreter; its failed assertion is this test's."""
    program = f"from {__name__} import {scene.__name__} as s; s({url!r})"
    run(sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program, cwd=ROOT)


def take(dislock, key):
    return dislock.lock(key).try_acquire()


def taken(dislock, key):
    """Tell whether somebody else has the lock: in a thread, or its holder would take it again."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(take, dislock, key).result(PATIENCE)
    if isinstance(answer, Lease):
        answer.release()
    return not answer


def in_child(act_in_child):
    """Fork; the child ends after its part, with status 0 if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        act_in_child()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(status)


def assert_well_ended(pid):
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def renewed(lease, times):
    wait_for(lambda: lease.renewals >= times or lease.why_ended, f"renewal of {lease!r}")
    assert lease.held, lease


def child_has_its_own(url):
    dislock = Dislock.from_url(url, watchdog_timeout=LEASE)
    lease = take(dislock, "parent")
    renewed(lease, 1)

    def child():
        renewals = lease.renewals
        assert not lease.held
        assert taken(dislock, "parent")
        assert not take(dislock, "parent")
        own = take(dislock, "child")
        renewed(own, 4)
        assert lease.renewals == renewals
        lease.release()  # which does nothing here
        own.release()

    pid = in_child(child)
    before = lease.renewals
    assert_well_ended(pid)
    renewed(lease, before + 3)
    assert taken(dislock, "parent")
    lease.release()
    take(dislock, "parent").release()


def child_outlives_its_parent(url):
    dislock = Dislock.from_url(url, watchdog_timeout=LEASE)
    read_end, write_end = os.pipe()

    def parent():
        renewed(take(dislock, "parent"), 1)
        in_child(child)
        time.sleep(PATIENCE)  # killed before that

    def child():
        own = take(dislock, "child")
        renewed(own, 1)
        os.write(write_end, b"1")
        wait_for(lambda: isinstance(take(dislock, "parent"), Lease), "the dead parent's lock")
        assert own.held
        os.write(write_end, b"2")

    pid = in_child(parent)
    assert os.read(read_end, 1) == b"1"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"2", "the child failed"


def child_leaves_the_block(url):
    try:
        with Dislock.from_url(url).lock("parent"):
            pid = os.fork()
            if pid == 0:
                raise ZeroDivisionError  # noqa: TRY301 -- in the child
    except ZeroDivisionError:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_child_makes_its_own_store_and_watchdog(redis_url):
    """After a fork the child shares nothing with its parent, whose lease stays alive by itself."""
    act(child_has_its_own, redis_url)


def test_a_child_does_not_keep_its_parents_lease(redis_url):
    """When the parent is killed its lease runs out, though its child lives and renews its own."""
    act(child_outlives_its_parent, redis_url)


def test_a_childs_own_exception_is_not_hidden(redis_url):
    """A child that leaves the block by an exception leaves it by that one."""
    act(child_leaves_the_block, redis_url)
