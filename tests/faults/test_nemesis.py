"""What goes wrong in the proof goes wrong as it says."""

import subprocess
import sys

import pytest
import redis

from proof.checker import check
from proof.clocks import Clocks, can_be_set
from proof.history import History, read
from proof.previous import unpack
from proof.processes import Processes
from proof.proxy import Proxy
from proof.site import Site
from tests.acceptance.fleet import wait_for
from tests.programs import NOT_HERE

TELL = """
import sys, time
for line in sys.stdin:
    print(time.time() - time.monotonic(), flush=True)
"""


@pytest.mark.skipif(not can_be_set(), reason=f"{NOT_HERE}a C compiler")
def test_a_clock_is_set_while_its_process_runs(tmp_path):
    """Its wall clock jumps forth and back; the monotonic one, and other processes, go on."""
    clocks = Clocks(tmp_path)
    command = [sys.executable, "-c", TELL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    told = {"one": [], "other": []}
    with (
        subprocess.Popen(command, env=clocks.of("one"), **pipes) as one,
        subprocess.Popen(command, env=clocks.of("other"), **pipes) as other,
    ):
        for seconds in (0, 3600, -90, 0):
            clocks.set("one", seconds)
            for name, process in (("one", one), ("other", other)):
                process.stdin.write("\n")
                process.stdin.flush()
                told[name].append(float(process.stdout.readline()))
    right = told["other"][0]
    assert [round(at - right) for at in told["one"]] == [0, 3600, -90, 0]
    assert [round(at - right) for at in told["other"]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Traceback: x is not y", "failed"),
        ("Cannot start with locks: no server", "refused"),
        ("WorkerLostError: Could not start worker processes", "unstarted"),
    ],
)
def test_why_a_process_has_ended_by_itself_is_told(tmp_path, words, kind):
    """A worker that Celery ends as a child has died is told apart; the log's end is shown."""
    history = History(tmp_path / "history")
    urls = dict.fromkeys(("url", "broker", "results"), "")
    more = {"folder": str(tmp_path), "seed": 1, "timeout": 1.0, "control": ""}
    site = Site(**urls, **more, options={}, has_lines=True)
    command = [sys.executable, "-c", f"print({words!r}); raise SystemExit(1)", "proof.nothing"]
    with Processes(command, 1, site, history) as processes:
        wait_for("it was noted", lambda: processes.revive() or read(tmp_path / "history"))
    history.close()
    event = read(tmp_path / "history")[0]
    assert (event.kind, event.more["code"]) == (kind, 1)
    shown = check([event]).violations[0].text
    assert shown.endswith(words)


def test_an_earlier_version_is_unpacked_if_it_is_here(tmp_path):
    """What git does not know is no error."""
    assert unpack(tmp_path / "none", "no-such-revision") is None
    if there := unpack(tmp_path / "there", "HEAD"):
        assert (there / "celery_dislock" / "__init__.py").is_file()


def test_an_address_is_told_as_that_of_the_proxy(redis_server):
    """Clients that are sent to another server go on through the proxy before it."""
    moved = "return redis.error_reply('MOVED 7 127.0.0.1:40001')"
    with Proxy(redis_server.port, {b"40001": b"50001"}) as proxy:
        client = redis.Redis.from_url(proxy.url)
        with pytest.raises(redis.ResponseError, match=r"127\.0\.0\.1:50001"):
            client.eval(moved, 0)
        assert client.echo("40001") == b"40001"
        client.close()
