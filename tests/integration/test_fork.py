"""A process that forks with a lease held: what is whose afterwards.

Each scene runs in an interpreter of its own, so that no fork happens inside the test run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.lease import Attempt, Conflict, Lease
from celery_dislock.locks.runtime import Runtime
from tests.holding import PATIENCE, wait_for
from tests.programs import run

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
OPTIONS = TaskOptions(lock_watchdog_timeout=1.5)


def act(scene: Callable[[str], None], url: str) -> None:
    """Play a scene in a new interpreter; its failed assertion is this test's."""
    program = f"from {__name__} import {scene.__name__} as s; s({url!r})"
    run(sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program, cwd=ROOT)


def take(runtime: Runtime, key: str) -> Lease | Conflict:
    owner = runtime.process.owner_name(f"{key}@w:{os.getpid()}/")
    return runtime.lock([key], OPTIONS).try_acquire(Attempt(owner, {"pid": os.getpid()}))


def in_child(act_in_child: Callable[[], None]) -> int:
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


def assert_well_ended(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def renewed(lease: Lease, times: int) -> None:
    wait_for(lambda: lease.renewals >= times or lease.why_ended, f"renewal of {lease!r}")
    assert lease.held, lease


def child_has_its_own(url: str) -> None:
    runtime = Runtime(lambda: {"dislock_url": url})
    lease = take(runtime, "parent")
    renewed(lease, 1)
    ours = runtime.process

    def child() -> None:
        renewals = lease.renewals
        theirs = runtime.process
        assert theirs is not ours
        assert theirs.pid == os.getpid()
        assert theirs.store is not ours.store
        assert theirs.watchdog is not ours.watchdog
        assert len(theirs.watchdog) == 0
        assert len(ours.watchdog) == 0
        assert isinstance(take(runtime, "parent"), Conflict)
        own = take(runtime, "child")
        renewed(own, 4)
        assert len(theirs.watchdog) == 1
        assert lease.renewals == renewals
        own.release()

    pid = in_child(child)
    assert runtime.process is ours
    before = lease.renewals
    assert_well_ended(pid)
    renewed(lease, before + 3)
    assert isinstance(take(runtime, "parent"), Conflict)
    lease.release()
    take(runtime, "parent").release()


def child_outlives_its_parent(url: str) -> None:
    runtime = Runtime(lambda: {"dislock_url": url})
    read_end, write_end = os.pipe()

    def parent() -> None:
        renewed(take(runtime, "parent"), 1)
        in_child(child)
        time.sleep(PATIENCE)  # killed before that

    def child() -> None:
        own = take(runtime, "child")
        renewed(own, 1)
        os.write(write_end, b"1")
        wait_for(lambda: isinstance(take(runtime, "parent"), Lease), "the dead parent's lock")
        assert own.held
        os.write(write_end, b"2")

    pid = in_child(parent)
    assert os.read(read_end, 1) == b"1"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"2", "the child failed"


def test_a_child_makes_its_own_store_and_watchdog(redis_url):
    """After a fork the child shares nothing with its parent, whose lease stays alive by itself."""
    act(child_has_its_own, redis_url)


def test_a_child_does_not_keep_its_parents_lease(redis_url):
    """When the parent is killed its lease runs out, though its child lives and renews its own."""
    act(child_outlives_its_parent, redis_url)
