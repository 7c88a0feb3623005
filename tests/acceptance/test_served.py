"""``python -m celery_dislock.testing``: other processes use it as a Redis."""

import os
import re
import signal
import socket
from types import SimpleNamespace

import pytest
import redis
from celery import chain, chord
from celery.exceptions import TaskRevokedError

from tests.acceptance.delayed_app import close
from tests.acceptance.fleet import LIMIT, REDELIVERY_IS_SLOW, ROOT, Worker, value_of, wait_for
from tests.acceptance.served_app import TICKS, made
from tests.commands import Dislock
from tests.forked import start_celery
from tests.groups import kill_group
from tests.programs import run, run_code
from tests.redis_server import free_port
from tests.serving import SERVE, serving

pytestmark = pytest.mark.xdist_group("served")


@pytest.fixture(scope="module")
def fleet(workers, tmp_path_factory):
    """A server, a prefork worker, a beat, and an app that sends."""
    folder = tmp_path_factory.mktemp("served")
    with serving() as (_, url):
        env = {"SERVED_URL": url, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
        app = made(url)

        def start(name):
            options = ["--pool", "prefork", "--concurrency", "3", "--dislock"]
            worker = Worker(folder, name, *options, app="tests.acceptance.served_app", env=env)
            workers[worker] = 0
            started.append(worker)
            worker.wait_until_ready()
            return worker

        started = []
        beat = None
        try:
            start("served")
            options = ["-A", "tests.acceptance.served_app", "beat", "--dislock"]
            options += ["--schedule", str(folder / "schedule")]
            beat = start_celery(options, folder, {**os.environ, **env}, folder / "beat.log")
            with redis.Redis.from_url(url, decode_responses=True) as client:
                yield SimpleNamespace(app=app, client=client, start=start, started=started)
        finally:
            for worker in started:
                worker.kill()
                workers.pop(worker)
            if beat is not None:
                kill_group(beat)
            close(app)


@pytest.fixture
def key(fleet, request):
    """A key of this test alone; its gate is open at the end."""
    key = request.node.originalname
    yield key
    fleet.client.set(f"gate:{key}", "open")


def begin(fleet, name, key):
    """Send a task that holds the lock; return when its body has begun."""
    result = fleet.app.tasks[name].delay(key)
    wait_for("the body has begun", lambda: fleet.client.exists(f"ran:{key}"))
    return result


def test_results_and_canvases_come_to_their_end(fleet):
    """Values by get(), a chain, and a chord, whose members the result backend counts."""
    add, total = (fleet.app.tasks[name] for name in ("add", "total"))
    assert add.delay(1, 2).get(timeout=LIMIT) == 3
    assert chain(add.s(1, 1), add.s(3))().get(timeout=LIMIT) == 5
    assert chord([add.s(i, i) for i in range(20)])(total.s()).get(timeout=LIMIT) == 380


def test_what_is_delayed_comes(fleet):
    """A retry and a countdown."""
    assert fleet.app.tasks["again"].delay().get(timeout=LIMIT) == 2
    assert fleet.app.tasks["add"].apply_async((1, 1), countdown=0.3).get(timeout=LIMIT) == 2


def test_locks_exclude_and_lines_keep_their_order(fleet, key):
    """A second task of the key is skipped; those in line run in order after the release."""
    holder = begin(fleet, "hold", key)
    with pytest.raises(TaskRevokedError, match=holder.id):
        fleet.app.tasks["hold"].delay(key).get(timeout=LIMIT)
    line = []
    for number in range(4):
        line.append(fleet.app.tasks["step"].delay(key, number))
        wait_for("it is parked", lambda: fleet.client.zcard(f"dislock:{{{key}}}:line") == len(line))
    fleet.client.set(f"gate:{key}", "open")
    assert holder.get(timeout=LIMIT) == key
    assert [one.get(timeout=LIMIT) for one in line] == [1, 2, 3, 4]
    assert fleet.client.lrange(f"steps:{key}", 0, -1) == ["0", "1", "2", "3"]


def test_a_revoke_is_heard(fleet, key):
    """Broadcasts reach the worker: it ends a body that runs."""
    result = begin(fleet, "hold", key)
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError, match="terminated"):
        result.get(timeout=LIMIT)
    assert fleet.app.control.inspect(timeout=LIMIT, limit=1).ping() == {
        "served@here": {"ok": "pong"}
    }


def test_the_beat_sends(fleet):
    """And a worker runs what it sends."""
    more = fleet.client.llen(TICKS) + 3
    wait_for("three ticks", lambda: fleet.client.llen(TICKS) >= more)


def test_the_commands_see_it(fleet, key):
    """`ls` lists the locks, and doctor finds nothing wrong."""
    holder = begin(fleet, "hold", key)
    dislock = Dislock(fleet.app)
    assert f"hold[{holder.id[:8]}" in dislock("ls").stdout
    doctor = dislock("doctor")
    assert doctor.exit_code == 0, doctor.output


@pytest.mark.skipif(REDELIVERY_IS_SLOW, reason="kombu looks for lost messages every 100 s")
def test_the_message_of_a_killed_worker_comes_again(fleet, key):
    """The broker gives it to the next worker, and the lock of the dead one ends."""
    result = begin(fleet, "hold late", key)
    fleet.started[-1].kill()
    fleet.client.set(f"gate:{key}", "open")
    fleet.start("another")
    assert value_of(result) == key  # after the lease, and the visibility timeout
    assert len(set(fleet.client.lrange(f"ran:{key}", 0, -1))) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_what_it_is_and_ends_at_a_signal(number):
    """It keeps nothing, and says so; it ends with status 0, with clients and all."""
    with serving() as (process, url), redis.Redis.from_url(url) as client:
        client.set("k", "1")
        process.send_signal(number)
        assert process.wait(LIMIT) == 0
        assert "not for production" in process.stdout.read()


@pytest.mark.extra
def test_a_port_that_is_taken():
    """It names one that is free, and takes that."""
    port = free_port(1)
    with socket.create_server(("127.0.0.1", port)):
        said = run(*SERVE, "--port", str(port), status=1).stderr
    assert f"port {port}: it is taken" in said
    other = re.search(r"--port (\d+)", said)[1]
    assert int(other) == port + 1
    with serving(other) as (_, url), redis.Redis.from_url(url) as client:
        assert client.ping()


@pytest.mark.extra
def test_without_its_extra_it_says_what_to_install():
    """In one line."""
    code = "import runpy, sys; sys.modules['fakeredis'] = None; sys.argv[1:] = ['--port', '0']\n"
    code += "runpy.run_module('celery_dislock.testing', run_name='__main__', alter_sys=True)"
    said = run_code(code, status=1).stderr
    assert "pip install 'celery-dislock[testing]'" in said
    assert "Traceback" not in said
