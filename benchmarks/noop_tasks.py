"""
The apps of the page: a task that does nothing, as it is, in locks of ours and of the peers.

    python -m benchmarks.noop_tasks VARIANT URL worker | send N

The worker, or a process that sends so many tasks.  It runs in the environment of its variant, so
it imports nothing else of ours.
"""

from __future__ import annotations

import sys
import time
import uuid
from functools import cache
from typing import Any

import redis
from celery import Celery

MARKS = "marks"  # a list: when the marking tasks ran
EXPIRE = 3600  # seconds
PROCESSES = 2  # of the pool
RELEASE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


def make_app(variant: str, url: str) -> Celery:
    """Make the app; its queue has the name of the variant."""
    app = Celery(variant, broker=url)
    app.conf.task_ignore_result = True
    app.conf.task_default_queue = variant
    client = cache(lambda: redis.Redis.from_url(url))  # of a pool process, made at its first use

    def nothing(n: int) -> None:
        pass

    def by_hand(n: int) -> None:
        name, token = f"by-hand:{n}", uuid.uuid4().hex
        if client().set(name, token, nx=True, ex=EXPIRE):
            client().register_script(RELEASE)(keys=[name], args=[token])

    options: dict[str, Any] = {}
    if variant == "celery-dislock":
        from celery_dislock import Dislock  # noqa: PLC0415  # not in a peer's environment

        Dislock(app)
        options = {"lock_key": "noop:<n>"}
    elif variant == "celery-once":
        from celery_once import QueueOnce  # noqa: PLC0415  # in one environment only

        settings = {"url": url, "default_timeout": EXPIRE}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        options = {"base": QueueOnce}
    elif variant == "celery-singleton":
        from celery_singleton import Singleton  # noqa: PLC0415  # as above

        app.conf.singleton_backend_url = url
        options = {"base": Singleton, "lock_expiry": EXPIRE}
    app.task(name="noop", **options)(by_hand if variant == "by-hand" else nothing)

    @app.task(name="mark")
    def mark() -> None:
        now = time.time()
        client().rpush(MARKS, now)

    return app


def main(variant: str, url: str, what: str, number: str = "0") -> None:
    """Be the worker, or send."""
    app = make_app(variant, url)
    if what == "worker":
        arguments = ["worker", "--pool", "prefork", "--concurrency", str(PROCESSES)]
        arguments += ["--loglevel", "WARNING"]
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        app.worker_main([*arguments, *(["--dislock"] if variant == "celery-dislock" else [])])
        return
    base = time.time_ns()  # each has a key of its own
    app.tasks["mark"].delay()
    for n in range(int(number)):
        app.tasks["noop"].delay(base + n)
    app.tasks["mark"].delay()


if __name__ == "__main__":
    main(*sys.argv[1:])
