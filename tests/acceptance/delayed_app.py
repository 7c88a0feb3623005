"""Tasks that are sent again after a delay, for each kind of queue.

DELAYED_QUEUES names the kind, DELAYED_LOCKS the Redis of the locks, DELAYED_URL that of results and
reports, and DELAYED_BROKER the broker.  With quorum queues, RabbitMQ delays messages itself.
"""

import os
import time

import redis
from celery import Celery
from kombu import Exchange, Queue

from celery_dislock import Dislock, SingletonTask
from celery_dislock.parking.process import runtime_of
from tests.pace import REPLY

LIMIT = 60.0  # seconds: longer than any test waits
SHORT = 0.3  # seconds: less than a broker with delayed delivery takes
QUEUES = ("first", "second")  # their names begin with the kind
# Queues with their exchange and routing key: two get each message, two each that RabbitMQ delays.
COPIED = [("third", "copied", "copied"), ("fourth", "copied", "copied")]
DOUBLED = [*COPIED, ("fifth", "fifth", "same"), ("sixth", "sixth", "same")]


def made(kind, locks, url, broker):
    """Make the app for queues of a kind: "quorum", "classic", or "redis"."""
    app = Celery("delayed", broker=broker, backend=url, set_as_current=False)
    arguments = {"x-queue-type": "quorum"} if kind == "quorum" else {}
    # Celery delays messages of quorum queues natively if their exchange is not a direct one.
    exchange_type = "direct" if kind == "redis" else "topic"
    app.conf.update(
        task_queues=[
            Queue(
                f"{kind}-{name}",
                Exchange(f"{kind}-{exchange}", exchange_type),
                f"{kind}-{key}",
                queue_arguments=arguments,
            )
            for name, exchange, key in [*((name, name, name) for name in QUEUES), *DOUBLED]
        ],
        task_default_queue=f"{kind}-first",
        task_default_queue_type="quorum" if kind == "quorum" else "classic",
        task_default_exchange=f"{kind}-first",
        task_default_exchange_type=exchange_type,
        task_default_routing_key=f"{kind}-first",
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        dislock_url=locks,
        dislock_transport_options={"socket_timeout": REPLY},
        dislock_watchdog_timeout=LIMIT,
    )
    Dislock(app)
    client = redis.Redis.from_url(url, decode_responses=True)

    def reported(key, what):
        client.rpush(f"ran:{key}", what)
        return what

    def declared(name, body, **options):
        app.task(
            name=name,
            base=SingletonTask,
            lock_key="<key>",
            shared=False,
            bind=True,
            max_retries=None,
            **options,
        )(body)

    def hold(self, key):
        while not client.exists(f"gate:{key}"):
            time.sleep(0.02)
        return "held"

    def run(self, key, what="ran"):
        return reported(key, what)

    def retry(self, key, times=1):
        if self.request.retries < times:
            reported(key, "retries")
            raise self.retry(countdown=SHORT)
        return reported(key, "ran")

    declared("hold", hold)
    declared("try", run, lock_on_conflict="retry", lock_retry_for=LIMIT)
    declared("queue", run, lock_on_conflict="queue")
    declared("retry", retry)
    declared("retry_held", retry, lock_hold_on_retry=True)
    declared("retry_unique", retry, lock_unique_until="end")
    declared("unique", hold, lock_unique_until="end")
    declared("cancel", hold, lock_on_conflict="cancel")
    declared(
        "debounce",
        run,
        lock_unique_until="start",
        lock_on_duplicate="replace",
        lock_replace_for=LIMIT,
    )
    declared(
        "debounce_briefly",
        run,
        lock_unique_until="start",
        lock_on_duplicate="replace",
        lock_replace_for=SHORT,
    )
    return app


def close(app):
    """Close all connections of an app; redis-py 5.0 leaves them to the garbage collector."""
    runtime_of(app).close()
    app.backend.result_consumer.stop()
    app.backend.client.connection_pool.disconnect()
    app.close()


if kind := os.environ.get("DELAYED_QUEUES"):
    app = made(kind, *(os.environ[f"DELAYED_{name}"] for name in ("LOCKS", "URL", "BROKER")))
