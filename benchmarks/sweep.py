"""
Look through 10,000 idle lines of parked tasks, as a worker does for those whose holder has died.

A task waits in each line, and each holder lives.  This process steps through them as the timer of a
worker makes it: a page of about 100 lines at a time, in one pipelined round trip, each line once in
ten seconds, a third of the default watchdog timeout.  Beside it, in turns of ten seconds: the same
script for as many lines, in pipelines of 100 at the same pace, with nothing around them.

CPU is this process's, and what the server uses more than when nobody asks it anything.  A step
keeps the worker's event loop from all else, so the longest counts.  A round is the time from one
first page to the next: in it each line is looked at.

Then 100 of the holders die, each at some time within twenty seconds.  Timed from the end of its
lease to the parked task's turn, when it would be published.

To reach: a round, and so each dead holder's line, within ten seconds.  What it costs is bounded by
the round, the number of lines, and the page.
"""

from __future__ import annotations

import random
import time
import uuid
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery

from benchmarks.report import Row, ratios, take_turns
from celery_dislock.config.options import TaskOptions
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import Ticket
from celery_dislock.parking.sweep import PAGE, Sweep, interval
from celery_dislock.scripts import SWEEP
from celery_dislock.servers.replies import Granted
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import redis

    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.parking.store import Lines
    from celery_dislock.servers.replies import Turn

LINES = 10_000
DYING = 100  # holders
MESSAGE = bytes(1_000)  # of each parked task
TTL = 3_600.0  # seconds, of the leases of those that live
EVERY = interval([TaskOptions(lock_key="sweep:<n>", lock_on_conflict="queue")]) or 0.0
WINDOW = EVERY  # seconds
ROUNDS = 4
IDLE = 3.0  # seconds without a command
SINCE = 2 * EVERY  # seconds within which the holders die
LIMIT = 10 * EVERY  # seconds until a line counts as not handed on
TIMER = 1.02  # what a timer may be late


class Window(NamedTuple):
    """
    What came out of a window.

    Attributes:
        cpu: Of a core, in this process.
        server: Of a core, in the server.
        longest: Milliseconds, of a step.
        lines: That were looked at.
        commands: That were sent, per second.
        inner: Commands of scripts, per second.
    """

    cpu: float
    server: float
    longest: float
    lines: int
    commands: float
    inner: float

    @property
    def per_line(self) -> float:
        """Microseconds of CPU in this process for each line."""
        return self.cpu * WINDOW / self.lines * 1e6


class Publisher:
    """Publishes nothing, and notes when it was to."""

    def __init__(self) -> None:
        self.handed: dict[str, float] = {}  # monotonic time of a lock's first turn

    def hand_over(self, turns: Sequence[Turn]) -> None:
        """Note the turns."""
        now = time.monotonic()
        for turn in turns:
            self.handed.setdefault(turn.lock, now)

    def tell_replaced(self, _lock: str, replaced: Mapping[str, bytes]) -> None:
        """Fail: no line here has an end."""
        assert not replaced


class Watched:
    """The lines of a process, watched while they are looked through."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.pages: list[int] = []  # lines on each
        self.first_pages: list[float] = []  # monotonic time of each

    def page(self, cursor: bytes, count: int) -> tuple[int, bytes, Mapping[str, bytes]]:
        """See `celery_dislock.parking.store.Lines.page`, as for the others."""
        if cursor == b"0":
            self.first_pages.append(time.monotonic())
        total, cursor, found = self._lines.page(cursor, count)
        self.pages.append(len(found))
        return total, cursor, found

    def sweep(self, locks: Sequence[str]) -> Mapping[str, Any]:
        """Sweep."""
        return self._lines.sweep(locks)

    def delist(self, lock: str, number: bytes) -> None:
        """Fail: no line here is empty."""
        raise AssertionError(lock, number)


class Bench:
    """
    The lines, and who looks through them.

    Args:
        url: Of the server.
        client: Of it.
    """

    def __init__(self, url: str, client: redis.Redis) -> None:
        app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.dislock_url = url
        self._client = client
        self._process = runtime_of(app).new_process()
        self.publisher = self._process.publisher = Publisher()  # type: ignore[assignment]
        self._owners = fill(self._process)
        self.watched = self._process.lines = Watched(self._process.lines)  # type: ignore[assignment]
        self._sweep = Sweep(self._process, "bench", EVERY)
        self._due = time.monotonic()
        self._wire: redis.Connection = client.connection_pool.get_connection()
        self._wire.send_command("SCRIPT", "LOAD", SWEEP.text)
        assert self._wire.read_response() in (SWEEP.sha, SWEEP.sha.encode())
        began, before = time.monotonic(), self._server_cpu()
        time.sleep(IDLE)
        self._idle = (self._server_cpu() - before) / (time.monotonic() - began)

    def ours(self) -> Window:
        """Step through the lines."""
        self._due = time.monotonic()
        return self._window(self._step)

    def bare(self) -> Window:
        """Run the script for as many lines."""
        locks = list(self._owners)
        pages = [locks[i : i + PAGE] for i in range(0, len(locks), PAGE)]
        began = time.monotonic()
        turn = 0

        def step() -> tuple[float, int]:
            nonlocal turn
            page = pages[turn % len(pages)]
            commands = [
                self._wire.pack_command("EVALSHA", SWEEP.sha, 1, lock, self._process.store.broker)
                for lock in page
            ]
            self._wire.send_packed_command([b"".join(map(b"".join, commands))])
            assert all(self._wire.read_response()[0] == 1 for _ in page)
            turn += 1
            return began + turn * EVERY / len(pages), len(page)

        return self._window(step)

    def let_die(self) -> list[float]:
        """Let holders die, and step until their lines are handed on; return after how long each."""
        ended = {}
        for lock in random.sample(sorted(self._owners), DYING):
            ttl = random.uniform(0.1, SINCE)
            ended[lock] = time.monotonic() + ttl
            assert self._process.store.renew([([lock], self._owners[lock], ttl)]) == [True]
        deadline = time.monotonic() + LIMIT
        self._due = time.monotonic()
        while not ended.keys() <= self.publisher.handed.keys():
            assert time.monotonic() < deadline, "a line is not handed on"
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._step()
        assert ended.keys() == self.publisher.handed.keys(), "a living holder's line was handed on"
        return [self.publisher.handed[lock] - end for lock, end in ended.items()]

    def _step(self) -> tuple[float, int]:
        delay = self._sweep.step()
        self._due = time.monotonic() + delay  # as a timer does that is set after the step
        return self._due, self.watched.pages[-1]

    def _window(self, step: Any) -> Window:
        self._client.config_resetstat()
        server, cpu = self._server_cpu(), time.process_time()
        began = due = time.monotonic()
        longest, lines = 0.0, 0
        while due < began + WINDOW:
            time.sleep(max(0.0, due - time.monotonic()))
            before = time.monotonic()
            due, seen = step()
            longest, lines = max(longest, time.monotonic() - before), lines + seen
        time.sleep(max(0.0, began + WINDOW - time.monotonic()))
        cpu = time.process_time() - cpu
        took = time.monotonic() - began
        server = (self._server_cpu() - server) / took - self._idle
        calls = {
            name: stats["calls"]
            for name, stats in self._client.info("commandstats").items()
            if not name.startswith(("cmdstat_info", "cmdstat_config"))
        }
        sent = calls.pop("cmdstat_evalsha")
        inner = sum(calls.values())
        return Window(cpu / took, server, longest * 1e3, lines, sent / took, inner / took)

    def _server_cpu(self) -> float:
        info = self._client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])


def fill(process: ParkingProcess) -> dict[str, str]:
    """Make the lines, each with a holder and a task; return the holders by lock."""
    owners = {}
    for n in range(LINES):
        lock, owner = f"dislock:{{sweep:{n}}}", f"{uuid.uuid4()}@bench:1/1.{n}"
        task_id = uuid.uuid4()
        assert isinstance(process.store.acquire([lock], owner, TTL, "{}"), Granted)
        process.lines.enlist(lock)
        ticket = Ticket(f"{task_id}:0:0", marked=False, message=MESSAGE)
        parked = process.lines.park([lock], f"{task_id}@bench:2/2.{n}", TTL, "{}", ticket)
        assert isinstance(parked, Parked)
        owners[lock] = owner
    return owners


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        bench = Bench(server.url, client)
        windows = take_turns({"ours": bench.ours, "bare": bench.bare}, ROUNDS)
        bench.watched.first_pages.clear()
        late = bench.let_die()
    ours, bare = windows["ours"], windows["bare"]
    firsts = bench.watched.first_pages
    rounds = [two - one for one, two in pairwise(firsts)]
    longest = max(window.longest for window in ours)
    cpu, server_cpu = (median(window[part] for window in ours) for part in (0, 1))
    return [
        Row(
            f"CPU of a sweep of {LINES:,} lines, % of a core",
            f"{cpu:.2%}",
            "bare EVALSHA",
            f"{median(window.cpu for window in bare):.2%}",
            ratios([window.cpu for window in ours], [window.cpu for window in bare]),
        ),
        Row(
            "  CPU per line, us",
            f"{median(window.per_line for window in ours):.1f}",
            "bare EVALSHA",
            f"{median(window.per_line for window in bare):.1f}",
            ratios([window.per_line for window in ours], [window.per_line for window in bare]),
        ),
        Row(
            "  CPU of the server",
            f"{server_cpu:.2%}",
            "bare EVALSHA",
            f"{median(window.server for window in bare):.2%}",
            ratios([window.server for window in ours], [window.server for window in bare]),
        ),
        Row(
            "  longest step, ms",
            f"{longest:.1f}",
            "bare EVALSHA",
            f"{max(window.longest for window in bare):.1f}",
        ),
        Row(
            "  commands per second",
            f"{median(window.commands for window in ours):,.0f}",
            "(of scripts)",
            f"{median(window.inner for window in ours):,.0f}",
        ),
        Row(
            "  lines on a page",
            f"{min(bench.watched.pages)}-{max(bench.watched.pages)}",
        ),
        Row(
            "  a round, s",
            f"{max(rounds):.1f}",
            target=f"<= {EVERY:g}",
            reached=max(rounds) <= EVERY * TIMER,
        ),
        Row(
            f"  {DYING} holders' death to the turn, s",
            f"{median(late):.1f}, max {max(late):.1f}",
            target=f"<= {EVERY:g}",
            reached=max(late) <= EVERY * TIMER,
        ),
    ]
