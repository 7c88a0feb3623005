"""
Hand a lock from one process to another, with 1, 8 and 48 waiters, beside a bare BLPOP wake-up.

Four processes (two, for one waiter) of up to 13 threads want the same lock; whoever had it lines
up again at once.  A hand-off begins before ``release()`` in one process and ends when ``acquire()``
has returned in another; the monotonic clock is one for the whole machine.  Beside it, in turns:

- bare: each thread blocks in BLPOP on a list of its own, and hands on by RPUSH to the next one's,
  over redis-py's connection with no client around it.  One waiter's median is the 1.0 of all;
- python-redis-lock, which blocks in BLPOP too, but lets newcomers pass;
- redis-py's Lock, which polls every 0.1 s.  Its threads stay away for longer than that after a
  turn: else the one that releases takes it again, and hardly anything is handed on.

To reach: at most 1.8 times bare with one waiter, 2 times bare with 8 and with 48, and with 48 the
same as with 1, as noise allows;
as many commands whoever waits; Jain's fairness index of the turns with 48 waiters over 0.98, where
everybody lines up again at once, redis-py's too; and, while one holds the lock for a minute, less
than one command per 10 s from each of 48 waiters.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol

import redis
import redis_lock

from benchmarks.report import Row, ratios, take_turns
from celery_dislock import Dislock
from example_project.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from typing_extensions import Self

PROCESSES = 4
WAITERS = (1, 8, 48)
FEW = WAITERS[1]  # enough that the line is not empty after a hand-off, as it is with one
MOST = WAITERS[-1]
HOLD = 0.002  # seconds: all others are in line by then
ROUND = 0.4  # seconds; some 150 turns
ROUNDS = 8
POLL_HOLD = 0.12  # seconds that redis-py's Lock is held, and is stayed away from: a poll and more
POLL_PAUSE = 0.11
POLL_ROUND = 1.0  # seconds
FEWEST = 2  # hand-offs in a round
STARTING = 0.05  # seconds for a job to reach its processes
ANSWERING = 60.0  # seconds that a process is given beyond its job
FAIR_ROUND = 4.0  # seconds
EXPIRE = 30  # seconds
WINDOW = 60.0  # seconds of waiting in vain: each waiter has asked again two or three times
PER = 10.0  # seconds

TARGETS = {1: 1.8, 8: 2.0, 48: 2.0}  # times bare, by the number of waiters
TARGET_SAME = 1.25  # what noise allows
TARGET_COMMANDS = 1.05
TARGET_FAIR = 0.98
TARGET_IDLE = 1.0  # commands per waiter and 10 s


class Job(NamedTuple):
    """What the processes are to do, all at once.

    Attributes:
        kind: Of lock; see `KINDS`.
        key: What it is about; no two jobs share it.
        contenders: Threads in all; one has the lock and the others wait.
        begin: Monotonic time.
        end: Monotonic time from which a turn counts no more.
        hold: Seconds of a turn.
        pause: Seconds from the end of a turn until its thread lines up again.
    """

    kind: str
    key: str
    contenders: int
    begin: float
    end: float
    hold: float = HOLD
    pause: float = 0.0


class Turn(NamedTuple):
    """One contender's having of the lock, in monotonic time."""

    began: float
    ended: float  # before the release
    contender: int

    @property
    def process(self) -> int:
        """Number of the contender's process."""
        return self.contender % PROCESSES


class Contender(Protocol):
    """One kind of lock, as one thread takes it."""

    def acquire(self) -> object:
        """Block until it is this thread's turn."""

    def release(self) -> object:
        """Hand on."""


class Bare:
    """A ring: each waits for a list of its own, and pushes to the next one's."""

    def __init__(self, url: str, job: Job, number: int) -> None:
        pool = redis.ConnectionPool.from_url(url)
        self._wire = pool.connection_class(**pool.connection_kwargs)
        self._wire.connect()
        self._mine = f"{job.key}:{number}"
        self._next = f"{job.key}:{(number + 1) % job.contenders}"

    def acquire(self) -> None:
        """Wait for the element."""
        self._send("BLPOP", self._mine, 0)

    def release(self) -> None:
        """Push it to the next one."""
        self._send("RPUSH", self._next, 1)

    def _send(self, *command: str | int) -> None:
        packed = self._wire.pack_command(*command)
        self._wire.send_packed_command(packed, check_health=False)
        self._wire.read_response()


class Process:
    """What the threads of one process share: one client of each kind, as an application has it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._dislock = Dislock.from_url(url)
        self._client = redis.Redis.from_url(url)
        self._kinds: dict[str, Callable[[Job], Contender]] = {
            "ours": lambda job: self._dislock.lock(job.key),
            "python-redis-lock": lambda job: redis_lock.Lock(self._client, job.key, expire=EXPIRE),
            "redis-py Lock": lambda job: self._client.lock(job.key, timeout=EXPIRE),
        }

    def run(self, job: Job, numbers: Sequence[int]) -> list[Turn]:
        """Contend, a thread for each number; return their turns."""
        if not numbers:
            return []
        with ThreadPoolExecutor(len(numbers)) as threads:
            turns = threads.map(lambda number: self._contend(job, number), numbers)
            return [turn for of_one in turns for turn in of_one]

    def _contend(self, job: Job, number: int) -> list[Turn]:
        bare = Bare(self._url, job, number) if job.kind == "bare" else None
        turns: list[Turn] = []
        time.sleep(max(0.0, job.begin - time.monotonic()))
        while True:
            lock = bare or self._kinds[job.kind](job)
            lock.acquire()
            began = time.monotonic()
            if began >= job.end:  # the others wait still: they are let through, one by one
                lock.release()
                return turns
            time.sleep(job.hold)
            ended = time.monotonic()
            lock.release()
            turns.append(Turn(began, ended, number))
            if job.pause:
                time.sleep(job.pause)


class Fleet:
    """The processes that contend, as a context manager; none is left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._jobs = 0
        self._started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit our memory and threads
        for number in range(PROCESSES):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(self._url, number, theirs), daemon=True)
            process.start()
            theirs.close()  # else we would wait for a process that has ended
            self._started.append((process, ours))
        for _, pipe in self._started:
            pipe.recv()  # it has imported all there is
        return self

    def __exit__(self, *_exc: object) -> None:
        for process, _ in self._started:
            process.terminate()
            process.join()

    def start(self, kind: str, waiters: int, seconds: float, **times: float) -> Job:
        """Let the processes contend for a new lock; returns at once."""
        self._jobs += 1
        begin = time.monotonic() + STARTING
        key = f"export:{self._jobs}"
        job = Job(kind, key, waiters + 1, begin, begin + seconds, **times)
        if kind == "bare":
            with redis.Redis.from_url(self._url) as client:
                client.rpush(f"{key}:0", 1)
        for _, pipe in self._started:
            pipe.send(job)
        return job

    def turns(self, job: Job, forming: int | None = None) -> list[Turn]:
        """
        Return the turns of the job that was started last, in order.

        Args:
            job: The job.
            forming: Number of turns left out, in which connections are made and the line forms;
                None: as many as there are contenders.
        """
        turns: list[Turn] = []
        for _, pipe in self._started:
            if not pipe.poll(max(0.0, job.end - time.monotonic()) + ANSWERING):
                raise TimeoutError("a process that waits for a lock does not answer")
            turns += pipe.recv()
        turns.sort()
        for before, after in pairwise(turns):
            assert before.ended <= after.began, f"two at a time had the lock: {before}, {after}"
        return turns[job.contenders if forming is None else forming :]

    def latency(self, kind: str, waiters: int) -> Callable[[], float]:
        """Make what measures a round: the median hand-off to another process, in microseconds."""
        polls = kind == "redis-py Lock"
        times = {"hold": POLL_HOLD, "pause": POLL_PAUSE} if polls else {}

        def measure() -> float:
            seconds = POLL_ROUND if polls else ROUND
            while True:
                job = self.start(kind, waiters, seconds, **times)
                took = hand_offs(self.turns(job, forming=0 if polls else None))
                if len(took) >= FEWEST:
                    return 1e6 * median(took)
                seconds *= 2  # the machine is so busy that the round was over too early

        return measure


def _work(url: str, number: int, pipe: Connection) -> None:
    process = Process(url)
    pipe.send(None)
    while True:
        job: Job = pipe.recv()
        pipe.send(process.run(job, range(number, job.contenders, PROCESSES)))


def hand_offs(turns: Sequence[Turn]) -> list[float]:
    """Return the seconds of each hand-off from one process to another."""
    return [
        after.began - before.ended
        for before, after in pairwise(turns)
        if before.process != after.process
    ]


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, Fleet(server.url) as fleet, server.client() as client:
        kinds = [("bare", 1), ("bare", MOST)]
        names = ("ours", "python-redis-lock", "redis-py Lock")
        kinds += [(kind, waiters) for kind in names for waiters in WAITERS]
        variants = {f"{kind} {waiters}": fleet.latency(kind, waiters) for kind, waiters in kinds}
        take_turns(variants, 1)  # scripts are loaded, caches warm
        latency = take_turns(variants, ROUNDS)
        commands: dict[int, tuple[float, float]] = {}
        for waiters in WAITERS:
            commands[waiters] = commands_per_hand_off(fleet, client, waiters)
        fairness = {kind: jain(fleet.turns(fleet.start(kind, MOST, FAIR_ROUND))) for kind in names}
        idle = commands_while_waiting(server.url, fleet, client)
    return [
        *latency_rows(latency),
        growth_row(latency),
        *command_rows(commands),
        *fairness_rows(fairness),
        Row(
            f"commands in {PER:g} s, per idle waiter",
            f"{idle:.2f}",
            target=f"< {TARGET_IDLE:g}",
            reached=idle < TARGET_IDLE,
        ),
    ]


def latency_rows(latency: dict[str, list[float]]) -> Iterator[Row]:
    def row(measured: str, waiters: int, peer: str, target: float | None = None) -> Row:
        ours, theirs = latency[f"ours {waiters}"], latency[peer]
        factors = ratios(ours, theirs)
        reached = None if target is None else median(factors) <= target
        return Row(
            measured,
            f"{median(ours):,.0f}",
            peer,
            f"{median(theirs):,.0f}",
            factors,
            "" if target is None else f"<= {target:g}",
            reached=reached,
        )

    for waiters in WAITERS:
        yield row(f"hand-off, {waiters} waiting, us", waiters, "bare 1", TARGETS[waiters])
        if waiters == MOST:
            yield row("", waiters, f"bare {MOST}")
        yield row("", waiters, f"python-redis-lock {waiters}")
        yield row("", waiters, f"redis-py Lock {waiters}")


def growth_row(latency: dict[str, list[float]]) -> Row:
    """Compare with bare's own growth, from one waiter in two processes to 48 in four."""
    ours, theirs = (
        ratios(latency[f"{kind} {MOST}"], latency[f"{kind} {WAITERS[0]}"])
        for kind in ("ours", "bare")
    )
    growth = ratios(ours, theirs)
    return Row(
        f"  {MOST} waiting beside {WAITERS[0]}, times",
        f"{median(ours):.2f}",
        "bare",
        f"{median(theirs):.2f}",
        growth,
        f"<= {TARGET_SAME:g}",
        reached=median(growth) <= TARGET_SAME,
    )


def command_rows(commands: dict[int, tuple[float, float]]) -> Iterator[Row]:
    few = commands[FEW]
    for waiters, (sent, called) in commands.items():
        yield Row(
            f"commands per hand-off, {waiters} waiting",
            f"{sent:.2f} + {called:.1f} in scripts",
            target=f"<= {TARGET_COMMANDS:g} times {FEW}'s" if waiters == MOST else "",
            reached=sent + called <= TARGET_COMMANDS * sum(few) if waiters == MOST else None,
        )


def fairness_rows(fairness: dict[str, float]) -> Iterator[Row]:
    ours = fairness.pop("ours")
    for peer, theirs in fairness.items():
        yield Row(
            f"Jain's fairness, {MOST} waiting",
            f"{ours:.3f}",
            peer,
            f"{theirs:.3f}",
            target=f"> {TARGET_FAIR:g}",
            reached=ours > TARGET_FAIR,
        )


def jain(turns: Sequence[Turn]) -> float:
    """
    Return Jain's fairness index of the contenders' turns: 1 where all had as many.

    Source:
        Jain, Chiu, Hawe: A quantitative measure of fairness and discrimination for resource
        allocation in shared computer systems, DEC-TR-301, 1984.
    """
    had = Counter(turn.contender for turn in turns)
    return sum(had.values()) ** 2 / ((MOST + 1) * sum(number**2 for number in had.values()))


def commands_per_hand_off(fleet: Fleet, client: redis.Redis, waiters: int) -> tuple[float, float]:
    """Count what clients send, and what scripts call, per turn; the server counts both alike."""
    before = calls(client)
    job = fleet.start("ours", waiters, FAIR_ROUND)
    turns = len(fleet.turns(job)) + 2 * job.contenders  # and all take one as the job ends
    made = calls(client) - before
    sent = sum(number for name, number in made.items() if name in {"evalsha", "blpop", "eval"})
    return sent / turns, (made.total() - sent) / turns


def calls(client: redis.Redis) -> Counter[str]:
    """Return how often the server has run each command, but for the asking itself."""
    stats = client.info("commandstats")
    return Counter(
        {
            name.removeprefix("cmdstat_"): int(stat["calls"])
            for name, stat in stats.items()
            if name != "cmdstat_info"
        }
    )


def commands_while_waiting(url: str, fleet: Fleet, client: redis.Redis) -> float:
    """Count what clients send while nothing happens, the holder's few renewals included."""
    dislock = Dislock.from_url(url)
    sent = 0
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        job = fleet.start("ours", MOST - 1, 0.0)  # nobody has a turn: all of them wait
        held.enter_context(dislock.lock(job.key))
        while client.info("clients")["blocked_clients"] < MOST:
            time.sleep(STARTING)
        monitor = stack.enter_context(client.monitor())
        time.sleep(WINDOW)
        client.echo("end")
        while not (seen := monitor.next_command())["command"].startswith("ECHO"):
            sent += seen["client_type"] != "lua"
        held.close()
        fleet.turns(job)
    return sent / MOST / WINDOW * PER
