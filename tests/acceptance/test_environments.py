"""Two environments of one app on one Redis, which Celery's ``global_keyprefix`` keeps apart."""

from __future__ import annotations

import pytest

from tests.acceptance import environment_app
from tests.acceptance.fleet import Worker, wait_for
from tests.redis_server import RedisServer

pytestmark = pytest.mark.acceptance

NAMES = ("staging:", "{live}")  # braces, as they are used to keep a broker in one slot


@pytest.fixture
def shared(redis_program, tmp_path):
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def environments(shared, tmp_path):
    """A worker of each environment, with its beat."""
    started = []
    try:
        for name in NAMES:
            nth = str(len(started))
            started.append(
                Worker(
                    tmp_path,
                    f"worker{nth}",
                    *("--dislock", "-B", "--schedule", str(tmp_path / f"schedule{nth}")),
                    *("--pool", "threads", "--concurrency", "6"),
                    app="tests.acceptance.environment_app",
                    env={"ENVIRONMENT": name, "ENVIRONMENT_URL": shared.url},
                )
            )
        for one in started:
            one.wait_until_ready()
        yield started
    finally:
        for one in started:
            one.kill()


def test_two_environments_on_one_redis(shared, environments):
    """Locks, lines, turns, unique keys, sweeps and beats of one are not those of the other."""
    with (
        shared.client(decode_responses=True) as client,
        environment_app.reports_of(shared.url) as reports,
    ):

        def began(name, what, times):
            reported = f"began {name}"
            wait_for(
                f"{times} x {what} in {name}",
                lambda: reports.lrange(reported, 0, -1).count(what) == times,
            )

        apps = {name: environment_app.make(name, shared.url) for name in NAMES}
        ids = set()
        for name, app in apps.items():
            ids.add(app.tasks["export"].delay(1).id)
            began(name, "export", 1)
            app.tasks["export"].delay(1)
            sent = [app.tasks["edit"].delay(1) for _ in range(2)]
            assert [one.duplicate for one in sent] == [False, True]
            ids.update(one.id for one in sent)
            began(name, "edit", 1)
        assert len(ids) == 4
        wait_for("both lines", lambda: len(client.keys("*{export:1}:line")) == 2)

        for name in NAMES:
            reports.set(f"gate {name}", "open")
            began(name, "export", 2)
            others = [other for other in NAMES if not reports.exists(f"gate {other}")]
            for other in others:
                began(other, "export", 1)
        for name in NAMES:
            wait_for(f"ticks in {name}", lambda name=name: int(reports.get(f"ticks {name}") or 0))
        wait_for("both sweep", lambda: len(client.keys("*:sweep:*")) == 2)
        assert len(client.keys("*{beat}:beat")) == 2
        names = client.keys()
        kept_apart = ("staging:", "{live}", "%7Blive%7D")
        assert [name for name in names if not name.startswith(kept_apart)] == []
        assert all(
            "prefix: " + prefix in worker.log
            for worker, prefix in zip(
                environments, ("staging:dislock", "%7Blive%7Ddislock"), strict=True
            )
        )
        for app in apps.values():
            app.close()
