"""Tasks with a rate in real workers: by the lock server's clock, and beside others."""

import pytest

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, REDELIVERY_IS_SLOW, Scene, fleets

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

MANY, BESIDE = 60, 20


@fleets("prefork", "rabbitmq", "threads", "gevent", "solo")
def test_a_burst_keeps_its_rate_and_others_are_not_delayed(fleet, scene):
    """Of sixty tasks at ten a second no window has more, and twenty others run before the last."""
    beside = [Scene(f"{scene.key}-{n}", scene.redis) for n in range(BESIDE)]
    rated = [fleet.send(scenarios.rated, scene.key) for _ in range(MANY // 2)]
    others = [fleet.send(scenarios.step, one.key) for one in beside]
    rated += [fleet.send(scenarios.rated, scene.key) for _ in range(MANY // 2)]
    for result in others:
        assert result.get(timeout=LIMIT) == {"held": True}
    for result in rated:
        result.get(timeout=LIMIT)
    assert len(scene.starts) == MANY
    assert max(start for one in beside for start in one.starts) < max(scene.starts)
    scene.assert_within_rate()


@pytest.mark.extra
@pytest.mark.skipif(REDELIVERY_IS_SLOW, reason="this kombu redelivers every 100 s")
def test_a_task_that_is_put_off_for_longer_than_its_broker_waits_runs_once(start_fleet, scene):
    """The worker that keeps it until then would get it again from its broker, and run both."""
    fleet = start_fleet("prefork", queue=scene.key, env={"SCENARIOS_VISIBILITY_TIMEOUT": "2"})
    for _ in range(2):  # the second comes when the first starts
        fleet.send(scenarios.rated_slowly_or_retry, scene.key).get(timeout=LIMIT)
    last = fleet.send(scenarios.rated_slowly_or_retry, scene.key)
    last.get(timeout=LIMIT)
    # Another copy of it would take the next start, or come before the next one is over.
    fleet.send(scenarios.rated_slowly_or_retry, scene.key).get(timeout=LIMIT)
    assert [event["id"] for event in scene.reported("begin")].count(last.id) == 1
    assert len(scene.starts) == 4


@pytest.mark.extra
def test_a_line_follows_the_release_that_takes_over(server, start_fleet, scene):
    """Tasks parked at one an hour start at ten a second, when workers of that release have come."""
    # A broker of their own, as workers of other tests, which have the new release, sweep its lines.
    own = {"queue": scene.key, "broker_url": server.url.removesuffix("0") + "3"}
    old = start_fleet("prefork", env={"SCENARIOS_RELEASE": "old"}, **own)
    sent = [old.send(scenarios.quickened, scene.key) for _ in range(25)]
    scene.wait_for_line(24)
    old.workers[0].terminate()
    assert old.workers[0].wait_until_it_ends() == 0
    assert len(scene.starts) == 1
    start_fleet("prefork", **own)
    for result in sent:
        result.get(timeout=LIMIT)
    assert len(scene.starts) == 25
    scene.assert_within_rate()
    scene.redis.delete(f"dislock:{{{scene.key}}}:starts")  # kept for the hour of the old rate
