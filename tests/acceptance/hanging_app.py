"""Tasks in line, beside plain ones, for servers that stop answering.

HANGING_QUEUES names the kind of the queues.  HANGING_BROKER is the broker, HANGING_LOCKS and
HANGING_RESULTS are the Redis of the locks and of the results, and HANGING_URL is that of gates and
reports, which always answers.
"""

import os
import time

import redis
from celery import Celery
from kombu import Exchange, Queue

from celery_dislock import Dislock, SingletonTask

TIMEOUT = 3.0  # seconds: of a lock, and of the first turn
URLS = ("BROKER", "LOCKS", "RESULTS", "URL")


def made(kind, broker, locks, results, url):
    """Make the app for queues of a kind: "quorum" or "topic", or "direct": Celery's default."""
    app = Celery("hanging", broker=broker, backend=results, set_as_current=False)
    app.conf.update(
        task_default_queue=f"hanging-{kind}",
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        dislock_url=locks,
        dislock_watchdog_timeout=TIMEOUT,
    )
    if kind != "direct":
        arguments = {"x-queue-type": "quorum"} if kind == "quorum" else {}
        exchange = Exchange(f"hanging-{kind}", "topic")
        app.conf.task_queues = [
            Queue(f"hanging-{kind}", exchange, "hanging.#", queue_arguments=arguments)
        ]
        app.conf.task_default_exchange = exchange.name
        app.conf.task_default_exchange_type = "topic"
        app.conf.task_default_routing_key = "hanging.one"
    Dislock(app)
    client = redis.Redis.from_url(url, decode_responses=True)

    def report(n):
        client.rpush("ran", n)
        return n

    def plain(n):
        client.rpush("probed", n)

    def hold():
        while not client.exists("gate"):
            time.sleep(0.02)
        return "held"

    about = {"base": SingletonTask, "lock_key": "line", "shared": False}
    app.task(name="hold", **about)(hold)
    app.task(name="queue", lock_on_conflict="queue", **about)(report)
    app.task(name="plain", shared=False, ignore_result=True)(plain)
    return app


if kind := os.environ.get("HANGING_QUEUES"):
    app = made(kind, *(os.environ[f"HANGING_{name}"] for name in URLS))
