"""Programs that are no Python packages, which tests start where they are installed.

A machine has Python and make, and perhaps nothing else.  What is not there skips the tests that
need it, and one line at the end says what was not tried.  In CI it fails them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.holding import wait_for
from tests.redis_server import ServerMissing, find_server

if TYPE_CHECKING:
    from typing import Any, NoReturn

LIMIT = 120.0  # seconds in which a program that is run to its end must end
NOT_HERE = "not installed: "  # how the reason begins for which such a test is skipped


def missing(what: str) -> NoReturn:
    """Skip a test for want of something; in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have {what}", pytrace=False)
    pytest.skip(f"{NOT_HERE}{what}")


def run(
    *command: str | Path, status: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """
    Run a program to its end; what it said is shown if it ends in another way.

    Args:
        command: The program and its arguments.
        status: How it has to end; None: in any way.
        options: More for ``subprocess.run``.
    """
    options = {"stdin": subprocess.DEVNULL, "timeout": LIMIT, **options}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    how = f"{command} has ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert status in {None, done.returncode}, how
    return done


def run_code(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in Python that is given as text; see :func:`run`."""
    return run(sys.executable, "-c", code, **options)


def alive(pid: int) -> bool:
    """Whether a process that is no child of ours runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # an orphan may stay a zombie where nobody reaps it
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that is no child of ours."""
    wait_for(lambda: not alive(pid), f"end of process {pid}")


def find_redis() -> Path:
    """Return the redis-server to run, or skip the test."""
    try:
        return find_server()
    except ServerMissing:
        missing("Redis")


def find_redis_cli() -> str:
    """Return the redis-cli to run, also one beside the server that is run, or skip the test."""
    folders = [os.environ["PATH"], str(find_redis().parent), str(Path(sys.executable).parent)]
    return shutil.which("redis-cli", path=os.pathsep.join(folders)) or missing("redis-cli")


def not_tried(reports: list[pytest.TestReport]) -> str:
    """Say in one line what was not tried; nothing if all is installed."""
    reasons = [one.longrepr[2] for one in reports if isinstance(one.longrepr, tuple)]
    found = Counter(
        reason.partition(NOT_HERE)[2].strip() for reason in reasons if NOT_HERE in reason
    )
    named = ", ".join(
        f"{what} ({times} {'test' if times == 1 else 'tests'})"
        for what, times in sorted(found.items())
    )
    return f"Not tried, as it is not installed here: {named}." if named else ""
