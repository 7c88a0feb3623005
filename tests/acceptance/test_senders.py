"""Who sends a task makes no difference: by name, or from another language."""

from __future__ import annotations

import json
import uuid

import pytest
from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kombu import Connection

from celery_dislock import LockHeldError
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for

pytestmark = [pytest.mark.acceptance, PREFORK]


@pytest.fixture
def send(fleet, scene):
    """Publish what a client in another language would: protocol 2, with what it asks for."""

    def send(name):
        task_id = str(uuid.uuid4())
        task = f"tests.acceptance.scenarios.{name}"
        with Connection(scenarios.app.conf.broker_url) as connection:
            connection.Producer().publish(
                json.dumps([[scene.key], {}, {}]),
                routing_key=fleet.queue,
                headers={"lang": "js", "id": task_id, "task": task},
                correlation_id=task_id,
                content_type="application/json",
                content_encoding="utf-8",
            )
        return AsyncResult(task_id, app=scenarios.app)

    return send


def test_a_lock_holds_whoever_has_sent_the_task(scene, send):
    """Each strategy does its work for a message that names the task and no more."""
    holder = send("hold")
    scene.wait_for_report("begin")
    with pytest.raises(TaskRevokedError, match=holder.id):
        send("hold").get(timeout=LIMIT)
    with pytest.raises(LockHeldError, match=holder.id):
        send("hold_or_raise").get(timeout=LIMIT)
    waiting, retrying = send("hold_or_wait"), send("hold_or_retry")
    wait_for("one is put off", lambda: retrying.state == states.RETRY)
    scene.open_gate()
    for result in (holder, waiting, retrying):
        assert result.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive()
