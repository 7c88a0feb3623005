"""What a killed test run leaves behind: nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import wait_until_gone

ROOT = Path(__file__).parents[2]
RUN = """
import os, subprocess, sys, time
from pathlib import Path
from tests.forked import template
from tests.integration.servers import SentinelServer
from tests.redis_server import RedisServer

def test_it_never_ends():
    long = "import time; time.sleep(600)"
    master = RedisServer(Path("server")).start()
    children = [
        template.start("timeit", [long], folder=Path(), env=os.environ, out=1, err=2),
        master,
        SentinelServer(Path("sentinel"), master.port).start(),
        subprocess.Popen([sys.executable, "-c", long], start_new_session=True),
    ]
    Path("pids.new").write_text(" ".join(str(child.pid) for child in children))
    Path("pids.new").rename("pids")
    time.sleep(600)
"""


@pytest.mark.extra
@pytest.mark.usefixtures("redis_program")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_takes_its_processes_along(tmp_path, how):
    """Those in a session of their own, too, as workers and servers are."""
    (tmp_path / "test_run.py").write_text(RUN, "utf-8")
    pids = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.orphans", "test_run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL,
    ) as run:
        while not pids.exists():
            assert run.poll() is None
        run.send_signal(how)
        run.wait(30)
    for pid in pids.read_text().split():
        wait_until_gone(int(pid))
