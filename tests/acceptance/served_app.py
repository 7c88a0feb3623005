"""The app of the processes that use the server for trying; SERVED_URL is its URL."""

import os
import time

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask

LOST_AFTER = 2  # seconds; the messages of a worker that was killed come again
TICKS = "ticks"  # a list with one item for each message of the beat


def made(url):
    """Make the app of a server."""
    app = Celery("served", broker=url, backend=url, set_as_current=False)
    app.conf.update(
        beat_schedule={"tick": {"task": "tick", "schedule": 0.5}},
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "visibility_timeout": LOST_AFTER,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
        dislock_watchdog_timeout=6,
    )
    Dislock(app)
    client = redis.Redis.from_url(url, decode_responses=True)

    @app.task(name="add", shared=False)
    def add(*numbers):
        return sum(numbers)

    @app.task(name="total", shared=False)
    def total(numbers):
        return sum(numbers)

    @app.task(name="tick", shared=False)
    def tick():
        client.rpush(TICKS, "1")

    @app.task(name="again", bind=True, shared=False)
    def again(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0.2)
        return self.request.retries

    def hold(key):
        client.rpush(f"ran:{key}", os.getpid())
        while not client.exists(f"gate:{key}"):
            time.sleep(0.02)
        return key

    def step(key, number):
        return client.rpush(f"steps:{key}", number)

    locked = {"base": SingletonTask, "lock_key": "<key>", "shared": False}
    app.task(name="hold", **locked)(hold)
    app.task(name="hold late", acks_late=True, **locked)(hold)
    app.task(name="step", lock_on_conflict="queue", **locked)(step)
    return app


if url := os.environ.get("SERVED_URL"):
    app = made(url)
