"""End what a test run has started, if the run itself is killed.

A run that ends by itself ends its workers and servers.  One that is killed cannot, and most of them
are in sessions of their own: nothing else would end them.  So each pytest process has a guardian, a
process that waits until its parent is gone and then kills every process with the run's mark in its
environment.  It finds them in ``/proc``; on a system without that nothing is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TESTS_STARTED_BY"  # the variable that all children inherit: id of the run's process
POLL = 0.5  # seconds between two looks at the parent

_guardians = []


def pytest_configure(config):
    """Mark this process's children, and start the guardian."""
    os.environ[MARK] = str(os.getpid())
    _guardians.append(
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            env={},  # unmarked
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a signal to the run's group spares it
        )
    )


def pytest_unconfigure(config):
    """End the guardian: the tests have ended what they started."""
    os.environ.pop(MARK, None)
    while _guardians:
        guardian = _guardians.pop()
        guardian.kill()
        guardian.wait()


def guard(parent):
    """Wait for the end of the parent, and kill all that it has left."""
    while os.getppid() == parent:
        time.sleep(POLL)
    mark = f"{MARK}={parent}".encode()
    for _ in range(2):  # once more, for what was being started meanwhile
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]))
