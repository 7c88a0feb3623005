"""``why`` on real servers: in a long line, among keys of others, on a cluster and on several."""

import time
from contextlib import ExitStack

import pytest
from celery import Celery
from redis.crc import key_slot

from celery_dislock import Dislock
from celery_dislock.servers import find
from tests.integration.servers import RedisCluster, several

PARKED = 1200  # more than a page of a hash
MESSAGE = '1 {"headers":{"dislock":{"v":1},"task":"shop.pay"}}\n'


@pytest.fixture
def asking(monkeypatch):
    """Make what asks at a lock server; no worker answers."""

    def ask(url):
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.dislock_url = url
        monkeypatch.setattr(app.control, "broadcast", lambda *_args, **_how: None)
        stack.callback(app.close)
        return stack.enter_context(Dislock(app))

    with ExitStack() as stack:
        yield ask


def park(client, key, many):
    """Write the records of tasks that are parked in one line, long ago."""
    for number in range(many):
        record = f"1 {number + 1} 0 30000 home {len(MESSAGE)} x:1 {MESSAGE}"
        client.hset(f"dislock:{{{key}}}:tickets", f"id-{number}:3:0", record)
        client.zadd(f"dislock:{{{key}}}:line", {f"id-{number}:3:0#": number + 1})


@pytest.mark.parametrize("pattern_of_others", ["other:*", "dislock:{*}"])
def test_a_task_in_a_long_line_is_found_among_the_keys_of_others(
    asking, redis_url, redis_client, pattern_of_others
):
    """Whatever its retries are, and whether its line is listed or not; in pages."""
    locks = asking(redis_url)
    for number in range(3 * find.SCANNED):
        redis_client.set(pattern_of_others.replace("*", f"[{number}]*"), "x")
    park(redis_client, "k", PARKED)
    answer = locks.why("id-700")
    told = f"shop.pay[id-700] is 701st of {PARKED} in line for lock 'k', which nobody holds now."
    assert answer.sentence == str(answer) == told
    assert locks.why("id-7*").state == locks.why("id-[7]").state == "not known"


def run(client, key, task_id):
    """Write the lease of a task that runs."""
    now = round(time.time() * 1000)
    lease = f'1 {now + 60_000} 7 {now} x {{"task":"shop.pay","id":"{task_id}","timeout":60}}'
    client.hset(f"dislock:{{{key}}}", f"{task_id}@w:1/a.1", lease)


def test_all_nodes_of_a_cluster_are_looked_at(asking, redis_program, tmp_path):
    """A task is found wherever its lock is."""
    with RedisCluster(tmp_path, node_timeout=60_000) as cluster:
        locks = asking(cluster.url)
        for number, master in enumerate(cluster.masters):
            with master.client() as client:
                slots = next(
                    one[0]
                    for one in client.execute_command("CLUSTER", "SLOTS")
                    if one[2][1] == master.port
                )
                key = next(f"k{n}" for n in range(10**5) if key_slot(f"k{n}".encode()) == slots)
                run(client, key, f"id-{number}")
        for number in range(3):
            assert locks.why(f"id-{number}").state == "running"
        assert locks.why("id-3").state == "not known"


def test_several_independent_servers_tell_who_runs(asking, redis_program, tmp_path):
    """A majority has its lease; one that is away hides nothing."""
    with several(3, tmp_path) as servers:
        locks = asking([one.url for one in servers])
        for server in servers:
            with server.client() as client:
                run(client, "k", "id-9")
        assert locks.why("id-9").state == "running"
        assert locks.why("id-8").state == "not known"
        servers[0].kill()
        assert locks.why("id-9").state == "running"
        told = locks.why("id-8")
        assert any("one did not answer" in one for one in told.rests_on)
        servers[1].kill()
        assert locks.why("id-9").away


def test_locks_without_an_app_have_no_workers(redis_url):
    """Neither a result backend: that is told."""
    with Dislock.from_url(redis_url) as locks:
        told = locks.why("nobody")
    assert told.state == "not known"
    assert "workers: not asked: these locks have no app" in told.rests_on


def test_locks_without_an_app_take_no_message_for_lost(redis_url, redis_client):
    """They do not read what is set aside; whoever then sends it again has it twice."""
    redis_client.hset("dislock:{k}:aside", "id-1:0:0", "1 damaged ...")
    with Dislock.from_url(redis_url) as locks:
        told = locks.why("id-1")
    assert told.state == "set aside"
    assert told.remedy.startswith("When a worker can run it: celery dislock put-back")
