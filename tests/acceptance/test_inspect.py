"""``celery inspect dislock`` and ``celery dislock doctor``, asked of real workers."""

from __future__ import annotations

import pytest
from celery import Celery

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, fleets, wait_for

pytestmark = pytest.mark.acceptance

ANSWER_WITHIN = 3.0  # seconds until a worker is asked again


def figures(fleet, command="dislock"):
    """What each worker of a fleet tells.  A worker that is just ready may miss a question."""
    names = [f"{worker.name}@here" for worker in fleet.workers]
    broker = fleet.broker_url or scenarios.app.conf.broker_url

    def asked():
        return client.control.broadcast(
            command, reply=True, destination=[name], timeout=ANSWER_WITHIN, limit=1
        )

    told = []
    with Celery(broker=broker, set_as_current=False) as client:
        for name in names:
            [reply] = wait_for(f"{name} answers", asked)
            told.append(reply[name])
    return told


def leases(fleet):
    """The leases that the workers tell of their running tasks."""
    return [lease for told in figures(fleet) for lease in told["leases"] if lease["held"]]


@fleets("prefork", "threads", "gevent")
def test_the_lease_of_a_task_that_runs_is_told(fleet, scene):
    """With the process that has it, its key, task and token, and since when; then it is gone."""
    result = scene.begin(fleet)
    [lease] = wait_for("the lease is told", lambda: leases(fleet))
    assert lease["pid"] == scene.reported("begin")[0]["pid"]
    assert (lease["key"], lease["id"], lease["token"]) == (scene.key, result.id, scene.lease.token)
    assert 0 < lease["held_for"] < LIMIT
    assert 0 < lease["remaining"] <= scenarios.LONG
    scene.open_gate()
    result.get(timeout=LIMIT)
    wait_for("nothing is held", lambda: not leases(fleet))
