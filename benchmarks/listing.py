"""
List 10,000 locks with ``celery dislock ls``, while another client waits for the server's answers.

Each lock is held by a task, and a parked task waits in the line of every tenth.  The command runs
in this process, from its options to its table.  Beside it: reading all names with SCAN alone, the
least that a list of them costs.

Another process sends PING after PING meanwhile.  Its slowest answer is how long the server had no
time for others, and what else the machine did.  So the server's own account stands beside it: its
time for one page, which is all that it does at a stretch: a SCAN, or the scripts of one pipeline.

To reach: the list within a second, and no stretch of more than 5 ms.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import uuid
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery
from click.testing import CliRunner

from benchmarks.report import Row, ratios, take_turns
from celery_dislock.operating.cli import dislock
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.overview import TOGETHER
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.server import SCANNED
from celery_dislock.servers.store import Store
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

LOCKS = 10_000
WAITED_FOR = 10  # one lock in so many has a line
TTL = 3_600.0  # seconds, of the leases
MESSAGE = b'1 {"headers":{"task":"shop.export","id":"id"}}\n' + bytes(1_000)
ROUNDS = 9
LIST_LIMIT = 1.0  # seconds
STRETCH_LIMIT = 5.0  # ms


def fill(url: str) -> None:
    """Make the locks."""
    store = Store(url, broker="bench")
    lines = Lines(store.lock_server, "dislock", "bench", lambda _turns: None)
    for n in range(LOCKS):
        lock, task_id = f"dislock:{{listing:{n}}}", str(uuid.uuid4())
        about = {"task": "shop.export", "id": task_id, "worker": "celery@bench", "pid": 7}
        holder = json.dumps({**about, "host": "bench", "timeout": TTL})
        owner = f"{task_id}@celery@bench:7/1.{n}"
        assert isinstance(store.acquire([lock], owner, TTL, holder), Granted)
        if n % WAITED_FOR == 0:
            lines.enlist(lock)
            ticket = Ticket(f"x{task_id}:0:0", marked=False, message=MESSAGE)
            assert isinstance(lines.park([lock], f"x{owner}", TTL, "{}", ticket), Parked)
    store.close()


def ping(url: str, go_on: Any, slowest: Any) -> None:
    """Note the slowest answer in ms, until told to stop."""
    with redis.Redis.from_url(url) as client:
        client.ping()
        while go_on.value:
            began = time.perf_counter()
            client.ping()
            took = (time.perf_counter() - began) * 1e3
            slowest.value = max(slowest.value, took)
            time.sleep(0.0005)


class Bench:
    """
    The command, and the server's account of it.

    Args:
        url: Of the server.
        client: Of it.
        slowest: Shared: the slowest answer to another client, in ms.
    """

    def __init__(self, url: str, client: redis.Redis, slowest: Any) -> None:
        self._app = Celery(broker=url, set_as_current=False)
        self._client = client
        self._slowest = slowest
        self.pages: list[float] = []  # ms of the server for a page, one per round
        self.scans: list[float] = []
        self.waits: list[float] = []  # ms, the slowest answer of each round

    def ours(self) -> float:
        """Run the command; return the seconds."""
        self._client.config_resetstat()
        self._slowest.value = 0.0
        began = time.perf_counter()
        answer = CliRunner().invoke(dislock, ["ls"], obj=SimpleNamespace(app=self._app))
        took = time.perf_counter() - began
        assert answer.exit_code == 0, answer.output
        assert len(answer.stdout.splitlines()) == LOCKS + 1
        self.waits.append(self._slowest.value)
        stats = self._client.info("commandstats")
        self.pages.append(stats["cmdstat_evalsha"]["usec_per_call"] * TOGETHER / 1e3)
        self.scans.append(stats["cmdstat_scan"]["usec_per_call"] / 1e3)
        return took

    def names(self) -> float:
        """Read the names alone; return the seconds."""
        began = time.perf_counter()
        found = sum(1 for _ in self._client.scan_iter("dislock:{*}*", count=SCANNED))
        took = time.perf_counter() - began
        assert found > LOCKS
        return took


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        fill(server.url)
        processes = multiprocessing.get_context("spawn")
        go_on, slowest = processes.Value("b", 1), processes.Value("d", 0.0)
        other = processes.Process(target=ping, args=(server.url, go_on, slowest))
        other.start()
        try:
            bench = Bench(server.url, client, slowest)
            times = take_turns({"ours": bench.ours, "names": bench.names}, ROUNDS)
        finally:
            go_on.value = 0
            other.join()
    took, page = median(times["ours"]), max(bench.pages)
    return [
        Row(
            f"celery dislock ls of {LOCKS:,} locks, s",
            f"{took:.2f}",
            "SCAN alone",
            f"{median(times['names']):.2f}",
            ratios(times["ours"], times["names"]),
            target=f"<= {LIST_LIMIT:g}",
            reached=took <= LIST_LIMIT,
        ),
        Row(
            "  the server at a stretch, ms",
            f"{page:.2f}",
            "a SCAN",
            f"{max(bench.scans):.2f}",
            target=f"<= {STRETCH_LIMIT:g}",
            reached=page <= STRETCH_LIMIT,
        ),
        Row(
            "  slowest answer to another, ms",
            f"{median(bench.waits):.2f}, max {max(bench.waits):.2f}",
        ),
    ]
