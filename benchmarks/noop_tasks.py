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
NEVER = "100000/s"  # a rate that refuses nobody
RELEASE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)
# As people write it: the starts of the last window in a sorted set.  Returns when it started, or
# how long to wait, below 0; in microseconds of the server.
SLIDING_WINDOW = """
local time, most, window = redis.call('TIME'), tonumber(ARGV[1]), tonumber(ARGV[2])
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - window))
if redis.call('ZCARD', KEYS[1]) >= most then
  return now - window - redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[3])
redis.call('PEXPIRE', KEYS[1], window / 1000)
return now
"""


def starts_now(client: redis.Redis, task: Any, name: str, most: int) -> int:
    """
    Count a start in a window of a second, and return its time; or send the task again.

    Args:
        client: Of the server that counts.
        task: The task, bound, with ``max_retries=None``.
        name: Of the rate.
        most: Starts in a window.
    """
    script = client.register_script(SLIDING_WINDOW)
    started = int(script(keys=[name], args=[most, 1_000_000, uuid.uuid4().hex]))
    if started <= 0:
        raise task.retry(countdown=-started / 1e6)
    return started


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

    def windowed(self: Any, _n: int) -> None:
        starts_now(client(), self, "window", 100_000)

    bodies = {"by-hand": by_hand, "sliding window": windowed}
    options: dict[str, Any] = {"bind": variant == "sliding window"}
    if variant.startswith("celery-dislock"):
        from celery_dislock import Dislock  # noqa: PLC0415  # not in a peer's environment

        Dislock(app)
        rated = {"lock_key": "noop", "lock_rate": NEVER}
        options = {"lock_key": "noop:<n>"} if variant == "celery-dislock" else rated
    elif variant == "rate_limit":
        options = {"rate_limit": NEVER}
    elif variant == "celery-once":
        from celery_once import QueueOnce  # noqa: PLC0415  # in one environment only

        settings = {"url": url, "default_timeout": EXPIRE}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        options = {"base": QueueOnce}
    elif variant == "celery-singleton":
        from celery_singleton import Singleton  # noqa: PLC0415  # as above

        app.conf.singleton_backend_url = url
        options = {"base": Singleton, "lock_expiry": EXPIRE}
    app.task(name="noop", **options)(bodies.get(variant, nothing))

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
        app.worker_main(
            [*arguments, *(["--dislock"] if variant.startswith("celery-dislock") else [])]
        )
        return
    base = time.time_ns()  # each has a key of its own
    app.tasks["mark"].delay()
    for n in range(int(number)):
        app.tasks["noop"].delay(base + n)
    app.tasks["mark"].delay()


if __name__ == "__main__":
    main(*sys.argv[1:])
