"""
Take locks in coroutines, beside redis.asyncio's Lock and beside our own blocking lock.

- Uncontended: as in `benchmarks.locks`, in one coroutine, and in sixteen of one event loop that
  have a lock each.  To reach: 1.2 times redis.asyncio's pairs per second.
- Hand-off: as there, in the coroutines of four processes.  To reach: twice the time that it takes
  of our blocking lock in the same run.
- Cancelled: acquisitions that are cancelled after some steps of the event loop, of free locks and
  of one that is held.  All are released then, so what is on the server a second later nobody has.
- Held, and waiting: locks that are all held at a time, and coroutines that wait for one lock.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.contender import ASYNC, Job, async_kind
from benchmarks.locks import OURS, PROCESSES, Fleet
from benchmarks.measuring import Figure, percentile
from benchmarks.report import take_turns
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis

    from benchmarks.locks import Round

UNCONTENDED, HAND_OFF = "Coroutines, uncontended", "Coroutines, hand-off, {} waiting"
TOGETHER = "Coroutines, uncontended, 16 at a time"
CANCELLED, KEPT = "1,000 cancelled acquisitions", "Coroutines that hold and wait"
NETWORK = "0 ms"
KINDS = (*ASYNC, OURS)
PAIR_ROUNDS = 30
AT_A_TIME = 16
WAITERS = (1, 48)
ROUNDS = 5
CANCELLATIONS = 1_000
MOST_STEPS = 12  # of the event loop until a cancellation; an acquisition takes a few
HELD, WAITING = 1_000, 200
SETTLE = 1.0  # seconds
PROMPT = 0.05  # seconds; a cancellation takes a step or two of the event loop
SEED = 26


def measure(folder: Path) -> list[Figure]:
    with RedisServer(folder / "turns") as server, ExitStack() as stack:
        fleets = {kind: Fleet(kind, server.url, PROCESSES, stack) for kind in KINDS}
        figures = []
        for table, kinds, coroutines in ((UNCONTENDED, KINDS, 1), (TOGETHER, ASYNC, AT_A_TIME)):
            pairs = {kind: partial(fleets[kind].pair, coroutines) for kind in kinds}
            take_turns(pairs, 2)  # scripts are loaded, caches warm
            for kind, took in take_turns(pairs, PAIR_ROUNDS).items():
                values = {
                    "pairs/s": [1 / seconds for seconds, _ in took],
                    "us of the processor for a pair": [1e6 * processor for _, processor in took],
                }
                figures += [Figure(table, name, kind, NETWORK, of) for name, of in values.items()]
        for waiters in WAITERS:
            rounds = take_turns(
                {kind: _rounds(fleet, waiters) for kind, fleet in fleets.items()}, ROUNDS
            )
            table = HAND_OFF.format(waiters)
            for kind, those in rounds.items():
                for share in (0.5, 0.99):
                    took_ms = [1e3 * percentile(one.took, share) for one in those]
                    figures.append(Figure(table, f"p{100 * share:g} ms", kind, NETWORK, took_ms))
    for kind in ASYNC:
        with RedisServer(folder / kind.replace(" ", "-")) as server, server.client() as client:
            counted = asyncio.run(_count(kind, server.url, client))
        for (table, name), value in counted.items():
            figures.append(Figure(table, name, kind, NETWORK, [value]))
    return figures


def _rounds(fleet: Fleet, waiters: int) -> Callable[[], Round]:
    return lambda: fleet.hand_offs(waiters)


async def _count(kind: str, url: str, server: redis.Redis) -> dict[tuple[str, str], float]:
    """Count what cancelled acquisitions leave, and what those take that hold and wait."""
    threads = threading.active_count()
    make = async_kind(kind, url)

    def lock(key: str) -> Any:
        return make(Job(key), 0)

    counted: dict[tuple[str, str], float] = {}

    def connections() -> int:
        return int(server.info("clients")["connected_clients"]) - 1

    def note_costs(when: str) -> None:
        counted[KEPT, f"threads, {when}"] = threading.active_count() - threads
        counted[KEPT, f"connections, {when}"] = connections()

    counted[CANCELLED, "cancellations not raised"] = await _cancel_many(lock)
    await asyncio.sleep(SETTLE)
    keys = [key.decode() for key in server.scan_iter(count=CANCELLATIONS)]
    leases = [key for key in keys if key.startswith(("free", "held")) or key.endswith("}")]
    counted[CANCELLED, "leases left"] = len(leases)
    counted[CANCELLED, "other keys left"] = len(keys) - len(leases)
    counted[CANCELLED, "connections"] = connections()
    server.flushall()

    locks = [lock(f"held:{number}") for number in range(HELD)]
    for one in locks:
        await one.acquire()
    note_costs(f"{HELD:,} held")
    for one in locks:
        await one.release()

    one = lock("waiting")
    await one.acquire()
    waiting = {asyncio.create_task(_take(lock("waiting"))) for _ in range(WAITING)}
    await asyncio.sleep(SETTLE)
    note_costs(f"{WAITING} waiting")
    await one.release()
    while waiting:  # not all are raised
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=PROMPT)
    return counted


async def _take(lock: Any) -> None:
    await lock.acquire()
    await lock.release()


async def _cancel_many(lock: Callable[[str], Any]) -> int:
    """
    Cancel acquisitions, half of them of a lock that is held; release what was acquired.

    Returns:
        How many cancellations were not raised.
    """
    chance, hidden = random.Random(SEED), 0
    held = lock("held")
    await held.acquire()
    for number in range(CANCELLATIONS):
        one = lock("held" if number % 2 else f"free:{number}")
        taking = asyncio.create_task(_take(one))
        for _ in range(chance.randint(0, MOST_STEPS)):
            await asyncio.sleep(0)
        while not taking.done():
            taking.cancel()
            ended, _ = await asyncio.wait([taking], timeout=PROMPT)
            hidden += not (ended and taking.cancelled())
    await held.release()
    return hidden
