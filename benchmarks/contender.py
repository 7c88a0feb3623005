"""
Take locks of one kind in the threads of one process, as another program says.

    CONTENDER_REDIS=URL python -m benchmarks.contender KIND

The URL is no argument, because it may have a password.  A line of standard input is a job, and the
answer is a line.  It runs in the environment of its kind, so it imports nothing else of ours.  A
`Job` with pairs: take and release an uncontended lock so often, with a new object each time, and
answer the seconds.  One without: contend for one lock, and answer the turns.  The kinds that are no
locks are the floors.
"""

from __future__ import annotations

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
CLIENT = {"max_connections": 10_000, "socket_timeout": None}  # all threads wait at the same time


class Job(NamedTuple):
    """What a process has to do.

    Attributes:
        key: What the lock is about; no two jobs share it.
        pairs: Of acquire and release; 0: contend.
        numbers: Of this process's threads.
        contenders: Threads in all processes; one has the lock, and the others wait.
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
    client = redis.Redis.from_url(url, **CLIENT)
    if name == "python-redis-lock":
        import redis_lock  # noqa: PLC0415  # as above

        return lambda job, _: redis_lock.Lock(client, job.key, expire=EXPIRE)
    return lambda job, _: client.lock(job.key, timeout=EXPIRE)


def pairs(make: Callable[[Job, int], Contender], job: Job) -> float:
    """Return the seconds that the pairs take."""
    began = time.perf_counter()
    for _ in range(job.pairs):
        lock = make(job, 0)
        assert lock.acquire() is not False
        lock.release()
    return time.perf_counter() - began


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


def main(name: str, url: str) -> None:
    """Do what each line says, until there are no more."""
    make = kind(name, url)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if job.pairs:
            print(json.dumps(pairs(make, job)), flush=True)
            continue
        turns: list[Turn] = []
        if job.numbers:
            with ThreadPoolExecutor(len(job.numbers)) as threads:
                for of_one in threads.map(lambda n: contend(make, job, n), job.numbers):  # noqa: B023
                    turns += of_one
        print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], os.environ["CONTENDER_REDIS"])
