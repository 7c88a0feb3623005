"""
Take and release an uncontended lock, and hand one from process to process, beside the peers.

Each kind of lock has four processes of its own, in an environment of its own; all of them are there
during the whole run, and wait for their turn.

- Uncontended: one thread, a new lock object for each pair.  The floors are two bare PINGs, and two
  EVALSHA of a script that does nothing.
- Hand-off: all threads want the same lock, and line up again at once after a turn.  A hand-off
  begins before ``release()`` in one process and ends when ``acquire()`` has returned in another;
  the monotonic clock is one for the whole machine.  The floor is a ring of threads of which each
  waits in BLPOP for a list of its own, and hands on by RPUSH to the next one's.  redis-py's Lock
  polls every 0.1 s.  Its threads stay away for longer than that after a turn: else the one that
  releases takes it again, and hardly anything is handed on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from benchmarks.contender import ASYNC, Job, Turn
from benchmarks.delay import delayed
from benchmarks.environments import ROOT, environment
from benchmarks.measuring import NETWORKS, Figure, percentile
from benchmarks.report import take_turns
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

UNCONTENDED, HAND_OFF = "Uncontended", "Hand-off, {} waiting"
OURS = "celery-dislock"
POLLING = "redis-py Lock"
PEERS = ("python-redis-lock", POLLING)
FLOORS = ("PING", "EVALSHA")  # of a pair
LOCKS = ("BLPOP", OURS, *PEERS)  # that are handed on; BLPOP is the floor
PAIRS = 100  # in a round
PAIR_ROUNDS = 15
PROCESSES = 4
WAITERS = (1, 10, 1000)
ROUNDS = 3
ROUND = 1.0  # seconds
FORMING = 0.004  # seconds for each thread, in which connections are made and the line forms
FEWEST = 4  # hand-offs in a round
POLL_HOLD = 0.12  # seconds that redis-py's Lock is held, and is stayed away from: a poll and more
POLL_PAUSE = 0.11
POLL_ROUND = 3.0  # seconds
CONNECTING = ("client", "hello", "info", "select", "auth", "script", "ping")
STARTING = 0.05  # seconds for a job to reach its processes


class Round(NamedTuple):
    """What came out of a round of hand-offs.

    Attributes:
        took: Seconds of each hand-off from one process to another.
        commands: Per turn, what scripts call included.
    """

    took: list[float]
    commands: float


class Fleet:
    """The processes of one kind of lock."""

    def __init__(self, kind: str, url: str, number: int, stack: ExitStack) -> None:
        self.kind = kind
        self._url = url
        python = environment(kind) if kind in PEERS else sys.executable
        command = [python, "-m", "benchmarks.contender", kind]
        pipe, environ = subprocess.PIPE, {**os.environ, "CONTENDER_REDIS": url}
        self._processes = [
            stack.enter_context(
                _ended(subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe))
            )
            for _ in range(number)
        ]
        for process in self._processes:
            self._answer(process)  # it has imported all there is

    def pairs(self) -> float:
        """Take and release so often; return the pairs per second."""
        return 1 / self.pair()[0]

    def pair(self, coroutines: int = 1) -> tuple[float, float]:
        """Take and release so often; return the seconds of a pair, and those of the processor."""
        self._tell(self._processes[0], Job(_key(), pairs=PAIRS, contenders=coroutines))
        took, processor = self._answer(self._processes[0])
        return took / PAIRS, processor / PAIRS

    def hand_offs(self, waiters: int) -> Round:
        """Contend for a while."""
        polls = self.kind in {POLLING, ASYNC[1]}
        seconds = POLL_ROUND if polls else ROUND
        while True:
            begin = time.monotonic() + STARTING
            counted = begin + 2 * STARTING + FORMING * waiters
            job = Job(_key(), contenders=waiters + 1, begin=begin, end=counted + seconds)
            if polls:
                job = job._replace(hold=POLL_HOLD, pause=POLL_PAUSE)
            before = self._calls()
            self.start(job)
            turns = self.turns(job)
            # As the job ends, each contender has one turn more.
            commands = (self._calls() - before) / (len(turns) + job.contenders)
            took = [
                after.began - before.ended
                for before, after in pairwise(turns)
                if before.ended >= counted and self._process(before) != self._process(after)
            ]
            if len(took) >= FEWEST:
                return Round(took, commands)
            seconds *= 2  # the machine is so busy that the round was over too early

    def turns(self, job: Job) -> list[Turn]:
        """Wait until the job that was started has ended; return its turns, in order."""
        turns = [Turn(*turn) for process in self._processes for turn in self._answer(process)]
        turns.sort()
        for before, after in pairwise(turns):
            assert before.ended <= after.began, f"two at a time had the lock: {before}, {after}"
        if self.kind == "BLPOP":
            with redis.Redis.from_url(self._url) as client:
                client.delete(*(f"{job.key}:{number}" for number in range(job.contenders)))
        return turns

    def start(self, job: Job) -> None:
        """Let all processes contend; returns at once."""
        if self.kind == "BLPOP":
            with redis.Redis.from_url(self._url) as client:
                client.rpush(f"{job.key}:0", 1)
        for number, process in enumerate(self._processes):
            numbers = range(number, job.contenders, len(self._processes))
            self._tell(process, job._replace(numbers=list(numbers)))

    def _calls(self) -> int:
        """Return how many commands the server has run, but for those of connecting and asking."""
        with redis.Redis.from_url(self._url) as client:
            stats = client.info("commandstats")
        return sum(
            of["calls"]
            for name, of in stats.items()
            if not name.removeprefix("cmdstat_").startswith(CONNECTING)
        )

    def _process(self, turn: Turn) -> int:
        return turn.contender % len(self._processes)

    def _tell(self, process: subprocess.Popen[bytes], job: Job) -> None:
        assert process.stdin
        process.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
        process.stdin.flush()

    def _answer(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout
        line = process.stdout.readline()
        assert line, f"a process of {self.kind} has ended"
        return json.loads(line)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the process, whatever it waits for."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _key() -> str:
    return f"bench-{uuid.uuid4().hex}"


def measure(folder: Path, network: str) -> list[Figure]:
    with RedisServer(folder) as server, delayed(server.url, NETWORKS[network]) as url:
        return measure_at(url, network)


def measure_at(url: str, network: str, most: int = WAITERS[-1]) -> list[Figure]:
    """
    Measure at a server, which may be anybody's: each key is new, and none is left.

    Args:
        url: Of the server.
        network: What the figures are said to be measured at.
        most: Waiters.
    """
    with ExitStack() as stack:
        fleets = {
            kind: Fleet(kind, url, 1 if kind in FLOORS else PROCESSES, stack)
            for kind in (*FLOORS, *LOCKS)
        }
        pairs = {kind: fleet.pairs for kind, fleet in fleets.items() if kind != "BLPOP"}
        take_turns(pairs, 2)  # scripts are loaded, caches warm
        rates = take_turns(pairs, PAIR_ROUNDS)
        latencies = take_turns(
            {
                f"{waiters} {kind}": _rounds(fleets[kind], waiters)
                for waiters in WAITERS
                if waiters <= most
                for kind in LOCKS
            },
            ROUNDS,
        )
    figures = [
        Figure(UNCONTENDED, "pairs/s", kind, network, values) for kind, values in rates.items()
    ]
    for name, rounds in latencies.items():
        waiters, _, kind = name.partition(" ")
        table = HAND_OFF.format(waiters)
        for share in (0.5, 0.99):
            values = [1e3 * percentile(one.took, share) for one in rounds]
            figures.append(Figure(table, f"p{100 * share:g} ms", kind, network, values))
        counted = [sum(len(one.took) for one in rounds)]
        figures.append(Figure(table, "hand-offs", kind, network, counted))
        if not NETWORKS[network]:  # no network changes what is sent
            commands = [median(one.commands for one in rounds)]
            figures.append(Figure(table, "commands of a turn", kind, network, commands))
    return figures


def _rounds(fleet: Fleet, waiters: int) -> Callable[[], Round]:
    return lambda: fleet.hand_offs(waiters)
