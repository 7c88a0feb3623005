"""Two environments of one app on one Redis, which Celery's ``global_keyprefix`` keeps apart."""

import logging
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.beat import Scheduler
from celery.contrib.testing.worker import start_worker

from celery_dislock import Dislock, SingletonTask
from celery_dislock.parking.process import runtime_of
from tests.holding import wait_for
from tests.integration.beats import recording

NAMES = {"staging:": "staging:", "{live}": "%7Blive%7D"}  # braces keep a broker in one slot


@pytest.fixture
def stack():
    level = logging.getLogger().level
    with ExitStack() as stack:
        yield stack
    logging.getLogger().setLevel(level)  # the workers have changed it


def environment(stack, name, url):
    """Return the app of an environment, with its task, which somebody keeps from running."""
    app = stack.enter_context(
        Celery(name, broker=url, backend="cache+memory://", set_as_current=False)
    )
    options = {"global_keyprefix": name, "polling_interval": 0.05}
    app.conf.update(broker_transport_options=options, worker_hijack_root_logger=False)
    app.conf.update(beat_schedule={"tick": {"task": "tick", "schedule": 0.05}}, result_expires=None)
    dislock = Dislock(app)
    stack.callback(runtime_of(app).close)

    @app.task(
        base=SingletonTask,
        name="export",
        lock_key="k",
        lock_on_conflict="queue",
        lock_unique_until="end",
        shared=False,
    )
    def export(): ...

    lock = dislock.lock("k")
    assert lock.try_acquire()
    return SimpleNamespace(app=app, export=export, lock=lock)


def worker(one):
    return start_worker(one.app, pool="threads", concurrency=2, perform_ping_check=False)


def test_two_environments_on_one_redis(stack, redis_url, redis_client):
    """Locks, lines, unique keys and beats of one are not those of the other."""
    # In one process kombu has one pool of connections for what has one URL.
    urls = (redis_url, redis_url.replace("127.0.0.1", "localhost"))
    both = [environment(stack, name, url) for name, url in zip(NAMES, urls, strict=True)]
    sent = []
    for one in both:
        with worker(one):
            first, second = one.export.delay(), one.export.delay()
            assert (first.duplicate, second.duplicate) == (False, True)
            wait_for(one.export.lock_for().line, "a line")
        sent.append(first)
    for one, first in zip(both, sent, strict=True):
        assert [place.id for place in one.export.lock_for().line()] == [first.id]
        assert len(one.export.lock_for().holders()) == 1
        one.lock.release()
        with worker(one):
            wait_for(first.ready, "its turn")
    for one in both:
        ticks = []
        one.app.beat = SimpleNamespace(alive=True, sends=lambda *told, to=ticks: to.append(told))
        beat = recording(Scheduler)(one.app)
        stack.callback(beat.close)
        wait_for(lambda beat=beat, ticks=ticks: beat.tick() and ticks, "a tick")
    assert len(redis_client.keys("*{beat}:beat")) == 2
    prefixes = (*NAMES, *NAMES.values())
    assert [name for name in redis_client.keys("*") if not name.startswith(prefixes)] == []
