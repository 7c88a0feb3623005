"""
Take locks of one kind in threads or coroutines of one process, as another program says.

    CONTENDER_REDIS=URL python -m benchmarks.contender KIND

The URL is no argument, because it may have a password.  A line of standard input is a job, and the
answer is a line.  It runs in the environment of its kind, so it imports nothing else of ours.  A
`Job` with pairs: take and release an uncontended lock so often, with a new object each time, and
answer the seconds, and those of the processor.  One without: contend for one lock, and answer the
turns.  The kinds that are no locks are the floors.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXPIRE = 30  # seconds
EMPTY = "return 1"  # the smallest script
ASYNC = ("celery-dislock, asyncio", "redis.asyncio Lock")  # kinds that coroutines take
CLIENT = {"max_connections": 10_000, "socket_timeout": None}  # all threads wait at the same time


class Job(NamedTuple):
    """What a process has to do.

    Attributes:
        key: What the lock is about; no two jobs share it.
        pairs: Of acquire and release; 0: contend.
        numbers: Of this process's threads.
        contenders: Threads in all processes; one has the lock, and the others wait.  Of pairs: the
            coroutines that share them, each with a lock of its own.
        begin: Monotonic time.
        end: Monotonic time from which a turn counts no more.
        hold: Seconds of a turn.
        pause: Seconds from the end of a turn until its thread lines up again.
    """

    key: str
    pairs: int = 0
    numbers: Sequence[int] = ()
    contenders: int = 1
    begin: float = 0.0
    end: float = 0.0
    hold: float = 0.002  # all others are in line by then
    pause: float = 0.0


class Turn(NamedTuple):
    """One contender's having of the lock, in monotonic time."""

    began: float
    ended: float  # before the release
    contender: int


class Contender(Protocol):
    """One kind of lock, as one thread takes it."""

    def acquire(self) -> object:
        """Block until it is this thread's turn."""

    def release(self) -> object:
        """Hand on."""


class Wire:
    """A connection of redis-py's without a client around it."""

    def __init__(self, url: str) -> None:
        pool = redis.ConnectionPool.from_url(url, **CLIENT)
        self._wire = pool.connection_class(**pool.connection_kwargs)
        self._wire.connect()

    def send(self, *command: str | int) -> Any:
        """Send a command, and return its reply."""
        packed = self._wire.pack_command(*command)
        self._wire.send_packed_command(packed, check_health=False)
        return self._wire.read_response()


class Ring:
    """Each waits in BLPOP for a list of its own, and pushes to the next one's."""

    def __init__(self, url: str, job: Job, number: int) -> None:
        self._wire = Wire(url)
        self._mine = f"{job.key}:{number}"
        self._next = f"{job.key}:{(number + 1) % job.contenders}"

    def acquire(self) -> None:
        """Wait for the element."""
        self._wire.send("BLPOP", self._mine, 0)

    def release(self) -> None:
        """Push it to the next one."""
        self._wire.send("RPUSH", self._next, 1)


class RoundTrips:
    """Two round trips that lock nothing."""

    def __init__(self, wire: Wire, *command: str | int) -> None:
        self._wire = wire
        self._command = command

    def acquire(self) -> None:
        """Make one."""
        self._wire.send(*self._command)

    release = acquire


def kind(name: str, url: str) -> Callable[[Job, int], Contender]:
    """Return what makes a contender's lock; one client of the kind serves the whole process."""
    if name == "BLPOP":
        return lambda job, number: Ring(url, job, number)
    if name == "PING":
        trips: Contender = RoundTrips(Wire(url), "PING")
        return lambda *_: trips
    if name == "EVALSHA":
        wire = Wire(url)
        trips = RoundTrips(wire, "EVALSHA", wire.send("SCRIPT", "LOAD", EMPTY).decode(), 1, "floor")
        return lambda *_: trips
    if name == "celery-dislock":
        from celery_dislock import Dislock  # noqa: PLC0415  # in one environment only

        dislock = Dislock.from_url(url)
        return lambda job, _: dislock.lock(job.key)
    if name == "python-redis-lock":
        import redis_lock  # noqa: PLC0415  # as above

        waits = redis.Redis.from_url(url, **CLIENT)
        return lambda job, _: redis_lock.Lock(waits, job.key, expire=EXPIRE)
    client = redis.Redis.from_url(url, max_connections=CLIENT["max_connections"])
    return lambda job, _: client.lock(job.key, timeout=EXPIRE)


def async_kind(name: str, url: str) -> Callable[[Job, int], Any]:
    """Return what makes a lock of a coroutine, as :func:`kind` does it."""
    if name == ASYNC[0]:
        from celery_dislock import Dislock  # noqa: PLC0415  # as above

        dislock = Dislock.from_url(url)
        return lambda job, _: dislock.async_lock(job.key)
    from redis.asyncio import Redis  # noqa: PLC0415  # for this kind only

    client = Redis.from_url(url, max_connections=CLIENT["max_connections"])
    return lambda job, _: client.lock(job.key, timeout=EXPIRE)


def pairs(make: Callable[[Job, int], Contender], job: Job) -> None:
    """Take and release so often."""
    for _ in range(job.pairs):
        lock = make(job, 0)
        assert lock.acquire() is not False
        lock.release()


async def async_pairs(make: Callable[[Job, int], Any], job: Job) -> None:
    """Take and release so often, in coroutines of which each has its own lock."""

    async def some(own: Job) -> None:
        for _ in range(job.pairs // job.contenders):
            lock = make(own, 0)
            assert await lock.acquire()
            await lock.release()

    jobs = [job._replace(key=f"{job.key}:{number}") for number in range(job.contenders)]
    await asyncio.gather(*map(some, jobs))


def contend(make: Callable[[Job, int], Contender], job: Job, number: int) -> list[Turn]:
    """Take the lock again and again, until the job has ended and it has been taken once more."""
    turns: list[Turn] = []
    lock = make(job, number)
    time.sleep(max(0.0, job.begin - time.monotonic()))
    while True:
        lock.acquire()
        began = time.monotonic()
        if began >= job.end:  # the others wait still: they are let through, one by one
            lock.release()
            return turns
        time.sleep(job.hold)
        ended = time.monotonic()
        lock.release()
        turns.append(Turn(began, ended, number))
        time.sleep(job.pause)
        if not isinstance(lock, Ring):
            lock = make(job, number)


async def async_contend(make: Callable[[Job, int], Any], job: Job, number: int) -> list[Turn]:
    """Do so in a coroutine."""
    turns: list[Turn] = []
    await asyncio.sleep(max(0.0, job.begin - time.monotonic()))
    while True:
        lock = make(job, number)
        await lock.acquire()
        began = time.monotonic()
        if began >= job.end:
            await lock.release()
            return turns
        await asyncio.sleep(job.hold)
        ended = time.monotonic()
        await lock.release()
        turns.append(Turn(began, ended, number))
        await asyncio.sleep(job.pause)


async def async_turns(make: Callable[[Job, int], Any], job: Job) -> list[list[Turn]]:
    """Let all coroutines of this process contend."""
    return await asyncio.gather(*(async_contend(make, job, number) for number in job.numbers))


def main(name: str, url: str) -> None:
    """Do what each line says, until there are no more."""
    loop = asyncio.new_event_loop() if name in ASYNC else None
    make: Callable[[Job, int], Any] = (async_kind if loop else kind)(name, url)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if job.pairs:
            began, processor = time.perf_counter(), time.process_time()
            if loop:
                loop.run_until_complete(async_pairs(make, job))
            else:
                pairs(make, job)
            took = time.perf_counter() - began, time.process_time() - processor
            print(json.dumps(took), flush=True)
            continue
        turns: list[Turn] = []
        if loop:
            turns = sum(loop.run_until_complete(async_turns(make, job)), turns)
        elif job.numbers:
            with ThreadPoolExecutor(len(job.numbers)) as threads:
                for of_one in threads.map(lambda n: contend(make, job, n), job.numbers):  # noqa: B023
                    turns += of_one
        print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], os.environ["CONTENDER_REDIS"])
