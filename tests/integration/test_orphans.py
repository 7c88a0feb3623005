"""What a killed test run leaves behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_redis_server import wait_until_gone

ROOT = Path(__file__).parents[2]
RUN = """
import os, subprocess, sys, time
from pathlib import Path
from tests.forked import template
from tests.integration.servers import SentinelServer
from tests.redis_server import RedisServer

def test_it_never_ends():
    long = "import time; time.sleep(600)"
    if {kind!r} == "forked":
        folder = Path()
        child = template.start("timeit", [long], folder=folder, env=os.environ, out=1, err=2)
    elif {kind!r} == "server":
        child = RedisServer(Path("server")).start()
    elif {kind!r} == "sentinel":
        master = RedisServer(Path("server")).start()
        child = SentinelServer(Path("sentinel"), master.port).start()
    else:
        child = subprocess.Popen([sys.executable, "-c", long], start_new_session=True)
    Path("pid.new").write_text(str(child.pid))
    Path("pid.new").rename("pid")
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (signal.SIGTERM, "started"),
        (signal.SIGKILL, "forked"),
        (signal.SIGKILL, "server"),
        (signal.SIGKILL, "sentinel"),
    ],
)
def test_a_killed_run_takes_its_processes_along(tmp_path, how, kind):
    """Those in a session of their own, too, as workers and servers are."""
    (tmp_path / "test_run.py").write_text(RUN.format(kind=kind), "utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.orphans", "test_run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    ) as run:
        while not (tmp_path / "pid").exists():
            assert run.poll() is None
        run.send_signal(how)
        run.wait(30)
    wait_until_gone(int((tmp_path / "pid").read_text()))
