"""Workers of this release beside those of a made-up next one, forwards and back, with a line."""

import uuid
from contextlib import closing

import pytest

from tests.faults.next_release import next_release
from tests.faults.parked_site import LIMIT, Site
from tests.holding import wait_for
from tests.redis_server import RedisServer

pytestmark = pytest.mark.faults


@pytest.fixture
def site(redis_program, tmp_path):
    with (
        RedisServer(tmp_path / "redis") as server,
        closing(Site(tmp_path, server, after=next_release(tmp_path))) as site,
    ):
        yield site


def line_up(site, key, names):
    for name in names:
        site.send("late" if name in "ad" else "early", key, name)
        site.wait_until_in_line(key, name)
    return list(names)


@pytest.mark.timeout(300)
def test_tasks_in_line_run_once_while_releases_change(site):
    """Each has its turn whoever has parked it; what only the next one can claim waits for it."""
    key = uuid.uuid4().hex[:8]
    old = site.start()
    holder = site.hold(key, "1")
    forwards = line_up(site, key, "abc")
    new = site.start(is_next=True)
    old.terminate()
    site.open_gate(holder)
    assert old.wait_until_it_ends() == 0
    site.wait_until_free(key)

    holder = site.hold(key, "2")
    back = line_up(site, key, "def")
    older = site.start()
    new.terminate()
    site.open_gate(holder)
    assert new.wait_until_it_ends() == 0
    older.wait_until_it_says("was written by a later release of celery-dislock")
    older.terminate()
    assert not {one.id for one in site.runs()} & set(back)

    site.start(is_next=True)
    for task in (*forwards, *back):
        site.wait_for_event("end", task)
    site.wait_until_free(key)
    site.wait_until_no_message_is_left()
    tasks = sorted([*forwards, *back])
    assert sorted(one.id for one in site.runs() if one.id in tasks) == tasks
    wait_for(lambda: {*map(site.state, tasks)} == {"SUCCESS"}, "their results", LIMIT)
    assert not site.redis.keys("*:aside")
    assert not [word for word in ("set aside", "raised unexpected", "delete") if site.says(word)]
