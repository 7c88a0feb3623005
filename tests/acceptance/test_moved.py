"""A lock server or a prefix that changes while workers are restarted, one after the other.

Parked tasks have their turns where they were parked.  They run once, there or here.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.acceptance import scenarios
from tests.acceptance.fleet import Scene, wait_for
from tests.forked import run_python
from tests.redis_server import RedisServer

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
PARKED = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def servers(tmp_path):
    """Two servers of this test alone: of the broker, and another one."""
    with (
        RedisServer(tmp_path / "old") as old,
        RedisServer(tmp_path / "new") as new,
        old.client(decode_responses=True) as client,
    ):
        yield old, new, Scene(uuid.uuid4().hex, client)


def moved(change, new):
    return {"dislock_prefix": "next"} if change == "prefix" else {"dislock_url": new.url}


def drain(old, conf, *args):
    """Run ``celery dislock drain`` with the settings of now."""
    env = {
        "SCENARIOS_URL": old.url,
        "SCENARIOS_BROKER_URL": old.url,
        "SCENARIOS_CONF": json.dumps(conf),
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
    }
    command = ["celery", "-A", "tests.acceptance.scenarios", "dislock", "drain", *args]
    return run_python(*command, folder=ROOT, env=env)


@pytest.mark.parametrize("change", ["prefix", "server"])
def test_parked_tasks_run_once_while_workers_are_moved(start_fleet, servers, change):
    """A new worker puts their turns off; an old one runs them, or `drain` sends them on."""
    old, new, scene = servers
    env = {"SCENARIOS_URL": old.url, "SCENARIOS_BROKER_URL": old.url}
    about = {"broker_url": old.url, "env": env}
    before = start_fleet("solo", conf={"dislock_watchdog_timeout": 3}, **about)
    holder = before.send(scenarios.hold_by_itself, scene.key)
    scene.wait_for_report("begin", id=holder.id)
    helper = start_fleet("solo", queue=before.queue, conf={"dislock_watchdog_timeout": 3}, **about)
    parked = []
    for place in range(1, PARKED + 1):
        parked.append(helper.send(QUEUE, scene.key))
        scene.wait_for_line(place)
    helper.workers[0].terminate()
    helper.workers[0].wait_until_it_ends()
    conf = {"dislock_watchdog_timeout": 3, **moved(change, new)}
    after = start_fleet("threads", queue=before.queue, conf=conf, **about)
    was_at = ["--from-prefix", "dislock"] if change == "prefix" else ["--from-url", old.url]
    told = drain(old, conf, *was_at, "--yes")
    assert (told.returncode, "A worker still uses" in told.stderr) == (1, True), told
    scene.open_gate()
    scene.open_gate(holder.id)
    wait_for("one is put off", lambda: after.says("has its turn for lock", "put off for"))
    assert not after.says("celery-dislock did not write")
    wait_for("an old worker has its turn", lambda: len(scene.reported("end")) >= 2)
    before.workers[0].terminate()
    before.workers[0].wait_until_it_ends()
    # Its lease on the sweep was released; what is in line there stands still.
    told = drain(old, conf, *was_at, "--yes")
    assert told.returncode == 0, told
    for result in parked:
        scene.wait_for_report("end", id=result.id)
    began = [event["id"] for event in scene.reported("begin")]
    assert sorted(began) == sorted([holder.id, *(result.id for result in parked)])
    later = after.send(QUEUE, scene.key)
    scene.wait_for_report("end", id=later.id)
    after.workers[0].kill()  # while there is a broker
