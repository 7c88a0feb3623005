"""
Parked tasks and counted starts by themselves, for the section `flow`.

- Idle parked tasks: of one key that is held all the time, in the line that a worker sweeps.  The
  commands of a minute are those that reach the lock server, what scripts call not counted.
- A blocked tenant: its tasks are parked from this process, as a worker does it, behind a holder
  that never ends.  Then a task of another tenant is parked behind the API's limit, which is given
  free at once: the time until that task has claimed its turn, with ten and with 100,000 tasks of
  the blocked tenant, on a server each, in turns.
- A counted start: acquire and release of a lock with a rate, less those of a lock without one, by
  the server's account; and the memory of the starts that are remembered.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery import Celery
from click.testing import CliRunner

from benchmarks.acquire_release import server_time
from benchmarks.locks import OURS
from benchmarks.measuring import Figure, percentile
from benchmarks.noop_tasks import NEVER
from benchmarks.recorded import worker as recorded_worker
from benchmarks.report import take_turns
from celery_dislock import Dislock
from celery_dislock.config.terms import Terms
from celery_dislock.operating.cli import dislock as command_line
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Bounds, Lines, Ticket
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.store import Store
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import redis

    from celery_dislock.servers.replies import Turn

IDLE, BLOCKED = "Idle parked tasks of a key", "A task of another tenant"
COUNTED, REMEMBERED = "A counted start", "The memory of a rate"
NETWORK = "0 ms"
FEW, MANY = 10, 1_000
MINUTE = 60.0  # seconds
SETTLE = 5.0  # seconds in which what has just begun comes to rest
PARKING = 90.0  # seconds until all tasks must be parked
BEFORE = (10, 100_000)  # tasks of the blocked tenant
TURNS = 200  # of another tenant, in a round
LISTS = 3  # of `ls`, in a round
ROUNDS = 5
START_ROUNDS = 15
TTL = 3_600.0  # seconds
MESSAGE = b'1 {"headers":{"task":"shop.call","id":"id"}}\n' + bytes(200)
TERMS = Terms(), Terms(limit=2)  # of tenant and API
BLOCKED_TENANT, API = "dislock:{tenant:a}", "dislock:{api}"
STARTS = (100, 1_000, 10_000)  # in a window


def measure(folder: Path) -> list[Figure]:
    return [
        *of_idle(folder / "idle"),
        *of_blocked(folder / "blocked"),
        *of_starts(folder / "starts"),
    ]


def figure(table: str, measured: str, variant: str, *values: float) -> Figure:
    return Figure(table, measured, variant, NETWORK, values)


def of_idle(folder: Path) -> list[Figure]:
    figures, parked = [], 0
    with (
        RedisServer(folder / "broker") as broker,
        RedisServer(folder / "locks") as locks,
        locks.client() as client,
        recorded_worker(folder, broker.url, locks.url, 2) as recorded,
        recorded.app.dislock.lock("parked"),
    ):
        for number in (FEW, MANY):
            for _ in range(number - parked):
                recorded.app.tasks["queue"].apply_async(("parked",))
            recorded.until(partial(_has, number - parked), PARKING)
            parked = number
            time.sleep(SETTLE)
            with client.monitor() as monitor:
                time.sleep(MINUTE)
                client.echo("end")
                sent = 0
                while not (seen := monitor.next_command())["command"].startswith("ECHO"):
                    sent += seen["client_type"] != "lua"
            name = f"{OURS}, {number:,} parked"
            figures.append(figure(IDLE, "commands in a minute", name, sent))
    return figures


class Tenants:
    """
    The tasks of a blocked tenant on a server, and what another tenant has of it.

    Args:
        server: The lock server.
        number: How many tasks of the blocked tenant are parked.
    """

    def __init__(self, server: RedisServer, number: int) -> None:
        self._app = Celery(broker=server.url, set_as_current=False)
        self._client: redis.Redis = server.client()
        self._turns: list[Turn] = []
        self._store = Store(server.url, broker="bench", hand_over=self._turns.extend)
        self._lines = Lines(self._store.lock_server, "dislock", "bench", self._turns.extend)
        assert isinstance(self._ask([BLOCKED_TENANT, API], str(uuid.uuid4())), Granted)
        began = time.monotonic()
        for _ in range(number):
            parked = self._ask([BLOCKED_TENANT, API], str(uuid.uuid4()), message=MESSAGE)
            assert isinstance(parked, Parked), parked
        self.each = (time.monotonic() - began) / number * 1e6  # microseconds of a parking
        assert not self._turns

    def turn(self) -> float:
        """Park a task of another tenant, let it run; return the ms from parking to its turn."""
        (busy, its), (task, mine) = (
            (str(uuid.uuid4()), [f"dislock:{{tenant:{name}}}", API]) for name in "bc"
        )
        owner = f"{busy}@bench:1/1.1"
        assert isinstance(self._ask(its, busy), Granted)
        began = time.perf_counter()
        assert isinstance(self._ask(mine, task, message=MESSAGE), Parked)
        self._store.release(its, owner, Ending(ticket=f"{busy}:0:0"))
        (handed,) = self._turns
        assert isinstance(self._ask([handed.lock], task, marked=True), Granted)
        took = time.perf_counter() - began
        self._turns.clear()
        self._store.release(mine, f"{task}@bench:1/1.1", Ending(ticket=f"{task}:0:0"))
        return took * 1e3

    def turns(self) -> list[float]:
        """Do so often."""
        return [self.turn() for _ in range(TURNS)]

    def sweep(self) -> float:
        """Sweep the blocked tenant's line; return the server's time in us."""
        self._client.config_resetstat()
        for _ in range(TURNS):
            assert dict(self._lines.sweep([BLOCKED_TENANT]))
        stats = self._client.info("commandstats")["cmdstat_evalsha"]
        return float(stats["usec_per_call"])

    def list(self) -> float:
        """List all locks, as `celery dislock ls` does; return the ms."""
        began = time.perf_counter()
        for _ in range(LISTS):
            answer = CliRunner().invoke(command_line, ["ls"], obj=SimpleNamespace(app=self._app))
            assert answer.exit_code == 0, answer.output
        return (time.perf_counter() - began) / LISTS * 1e3

    def _ask(
        self, locks: Sequence[str], task: str, *, marked: bool = False, message: bytes = b""
    ) -> object:
        bounds = Bounds(most_bytes=2**32)
        ticket = Ticket(f"{task}:0:0", marked, message, terms=TERMS[: len(locks)], bounds=bounds)
        return self._lines.park(locks, f"{task}@bench:1/1.1", TTL, "{}", ticket)


def of_blocked(folder: Path) -> list[Figure]:
    with ExitStack() as stack:
        tenants = {}
        for number in BEFORE:
            server = stack.enter_context(RedisServer(folder / str(number)))
            tenants[f"{OURS}, {number:,} parked"] = Tenants(server, number)
        turns, sweeps, lists = (
            take_turns({name: getattr(of, what) for name, of in tenants.items()}, ROUNDS)
            for what in ("turns", "sweep", "list")
        )
    figures = []
    for name, of in tenants.items():
        for share in (0.5, 0.99):
            values = [percentile(one, share) for one in turns[name]]
            figures.append(figure(BLOCKED, f"parked to turn, p{100 * share:g} ms", name, *values))
        figures.append(figure(BLOCKED, "a sweep, us of the server", name, *sweeps[name]))
        figures.append(figure(BLOCKED, "`ls`, ms", name, *lists[name]))
        figures.append(figure(BLOCKED, "us to park one", name, of.each))
    return figures


def _has(number: int, noted: Sequence[object]) -> bool:
    return len(noted) >= number


def of_starts(folder: Path) -> list[Figure]:
    figures = []
    with RedisServer(folder) as server, server.client() as client:
        dislock = Dislock.from_url(server.url)
        bare = client.script_load("return 1")

        def pair(**terms: Any) -> Callable[[], None]:
            def take() -> None:
                lock = dislock.lock("rated" if terms else "plain", **terms)
                assert lock.acquire(blocking=False)
                lock.release()

            return take

        pairs = {
            "EVALSHA": lambda: client.evalsha(bare, 1, API),
            "plain": pair(),
            "rated": pair(rate=NEVER),
        }
        times = take_turns(
            {name: partial(server_time, client, run) for name, run in pairs.items()},
            START_ROUNDS,
        )
        starts = [  # of two scripts each
            2 * (rated - plain) for rated, plain in zip(times["rated"], times["plain"], strict=True)
        ]
        for name, values in {
            "EVALSHA": times["EVALSHA"],
            f"{OURS}, acquire and release": [2 * one for one in times["plain"]],
            f"{OURS}, the same with lock_rate": [2 * one for one in times["rated"]],
            f"{OURS}, the start alone": starts,
        }.items():
            figures.append(figure(COUNTED, "us of the server", name, *values))
        least = median(times["EVALSHA"])
        values = [one / least for one in starts]
        start = f"{OURS}, the start alone"
        figures.append(figure(COUNTED, "times a bare EVALSHA", start, *values))
        for most in STARTS:
            for _ in range(most):
                lock = dislock.lock(f"starts-{most}", rate=f"{most}/h")
                assert lock.acquire(blocking=False)
                lock.release()
            taken = client.memory_usage(f"dislock:{{starts-{most}}}:starts", samples=0)
            assert taken
            name = f"{OURS}, {most:,} an hour"
            figures.append(figure(REMEMBERED, "bytes", name, taken))
            figures.append(figure(REMEMBERED, "bytes per start", name, taken / most))
        dislock.close()
    return figures
