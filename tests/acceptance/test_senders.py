"""Who sends a task makes no difference: by name, by beat, from another language."""

from __future__ import annotations

import json
import os
import uuid

import pytest
from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kombu import Connection

from celery_dislock import LockHeldError
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, ROOT, wait_for
from tests.forked import start_celery

pytestmark = [pytest.mark.acceptance, PREFORK]

SKIPS = 3
SCHEDULE = """
from tests.acceptance.scenarios import app

app.conf.beat_schedule = {{
    "often": {{
        "task": "tests.acceptance.scenarios.{task}",
        "schedule": 0.2,
        "args": [{key!r}],
        "options": {{"queue": {queue!r}}},
    }},
}}
"""


def from_elsewhere(fleet, name, key):
    """Publish what a client in another language would: protocol 2, with what it asks for."""
    task_id = str(uuid.uuid4())
    with Connection(scenarios.app.conf.broker_url) as connection:
        connection.Producer().publish(
            json.dumps([[key], {}, {}]),
            routing_key=fleet.queue,
            headers={
                "lang": "js",
                "id": task_id,
                "task": f"tests.acceptance.scenarios.{name}",
            },
            correlation_id=task_id,
            content_type="application/json",
            content_encoding="utf-8",
        )
    return AsyncResult(task_id, app=scenarios.app)


def test_a_lock_holds_whoever_has_sent_the_task(fleet, scene):
    """Each strategy does its work for a message that names the task and no more."""
    send = from_elsewhere
    holder = send(fleet, "hold", scene.key)
    scene.wait_for_report("begin")
    with pytest.raises(TaskRevokedError, match=holder.id):
        send(fleet, "hold", scene.key).get(timeout=LIMIT)
    with pytest.raises(LockHeldError, match=holder.id):
        send(fleet, "hold_or_raise", scene.key).get(timeout=LIMIT)
    waiting = send(fleet, "hold_or_wait", scene.key)
    retrying = send(fleet, "hold_or_retry", scene.key)
    wait_for("one is put off", lambda: retrying.state == states.RETRY)
    scene.open_gate()
    for result in (holder, waiting, retrying):
        assert result.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive()


def test_of_what_beat_sends_one_runs_at_a_time(fleet, scene, tmp_path):
    """A schedule that is faster than its task, by two schedulers, never runs beside itself."""
    source = SCHEDULE.format(task="hold", key=scene.key, queue=fleet.queue)
    (tmp_path / "scheduled.py").write_text(source)
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": paths, "SCENARIOS_URL": scenarios.app.conf.broker_url}
    beats = []
    try:
        for number in (1, 2):
            command = ["-A", "scheduled", "beat", "--schedule", str(tmp_path / f"schedule{number}")]
            beats.append(start_celery(command, tmp_path, env, tmp_path / f"beat{number}.log"))

        def skipped():
            words = (f"lock {scene.key!r} is held by", "] skipped: ")
            logs = [worker.log for worker in fleet.workers]
            lines = (line for log in logs for line in log.splitlines())
            return sum(all(word in line for word in words) for line in lines)

        wait_for("many are skipped", lambda: skipped() >= SKIPS)
        assert len(scene.reported("begin")) == 1
        scene.open_gate()
        scene.wait_for_report("end", times=SKIPS)
    finally:
        for beat in beats:
            beat.terminate()
        for beat in beats:
            beat.wait(LIMIT)
    wait_for("the queue is empty", lambda: not scene.redis.exists(fleet.queue))
    scene.wait_until_free()
    scene.assert_exclusive()
