"""
Run 1,000 tasks of one hot key among 1,000 of as many other keys, in a worker with four slots.

All messages stand in the queue before a run begins, shuffled, the same way each time.  A body of
the hot key sleeps for 20 ms, another for 100 ms: so the hot ones, one after the other, need one
slot for 20 s, and the others all four for 25 s.  What holds the others up beyond a quarter of the
slots is what is done about the hot lock.

- "queue": ours, parked in line;
- SET NX + retry: the lock that people write by hand, as in Celery's cookbook, with
  ``self.retry(countdown=1)`` without end where it is held;
- "wait": ours, in line in its slot;
- others alone: without the hot key, the strictest reference.  It has half the messages, and four
  slots of which the hot bodies need none;
- all keys differ: the same 2,000 messages and bodies, none in another's way: what that load takes
  by itself.  It is fair about the messages, and has the hot bodies run side by side.

Time runs from the first delivery.  To reach: the last of the others ends at most 10 % later than
without the hot key, no execution is wasted, and no body runs twice.

A delivery that ends without its body has taken a slot for nothing, and with a lock by hand each of
these is wasted.  A parked task has one in which it is parked, the price of parking, which shows in
the deliveries and their slot-seconds; only further ones are wasted.  "In the slot" are the seconds
from the start of a hot task's delivery to that of its body, or to its end where it has none: to ask
for the lock, to wait for it, to be parked or sent again.  Messages are the LPUSHes of a run: the
retries, or the turns of parked tasks.

The message of a turn goes to the end of the queue, behind all others.  So few hot bodies run before
the others are done, and the last task ends later than where retries come in between.  Where the
queue takes longer than a turn is reserved, thirty seconds and then twice as long each time, the
turn is given again, and one of its two messages is wasted.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.recorded import ran, worker
from benchmarks.recorded_tasks import COUNTDOWN, QUEUE, make_app
from benchmarks.report import Row, ratios
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import redis

    from benchmarks.recorded import Recorded
    from benchmarks.recorded_tasks import Delivery

HOT = 1_000  # tasks
OTHERS = 1_000
HOT_SECONDS = 0.02  # of a body
OTHER_SECONDS = 0.1
SLOTS = 4
SEED = 4711
RUN_LIMIT = 150.0  # seconds until a run counts as failed
SETTLE = 1.0  # seconds: a copy that comes late is to be seen
TARGET = 1.1

BY_HAND = f"SET NX + retry({COUNTDOWN} s)"
WAIT = '"wait"'


class Variant(NamedTuple):
    """One way to run the tasks: by which task, how many of the hot key, and whether it is one."""

    task: str
    hot: int = HOT
    one_key: bool = True


VARIANTS = {
    "alone": Variant("queue", hot=0),
    "queue": Variant("queue"),
    "all keys differ": Variant("queue", one_key=False),
    BY_HAND: Variant("by_hand"),
    WAIT: Variant("wait"),
}
RUNS = ("alone", "queue", "all keys differ", BY_HAND, WAIT, "alone")


class Run(NamedTuple):
    """
    What came out of a run.

    Attributes:
        others: Seconds until the last of the others ended.
        all: Seconds until the last task ended.
        unrun: Deliveries that ended without their body.
        wasted: Those of them that were not the first of a parked task.
        twice: Bodies beyond one for each task.
        in_slot: Seconds that deliveries of the hot key spent in their slot before their body.
        unrun_seconds: Those of them in deliveries without a body.
        published: Messages.
    """

    others: float
    all: float
    unrun: int
    wasted: int
    twice: int
    in_slot: float
    unrun_seconds: float
    published: int


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        stocks = publish(server.url, client)
        with worker(folder, server.url, server.url, SLOTS) as recorded:
            runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
            for name, stock in zip(RUNS, stocks, strict=True):
                runs[name].append(measure(recorded, client, stock, VARIANTS[name]))
        leftover = [
            name
            for pattern in ("dislock:{*}*", "by-hand:*")
            for name in client.scan_iter(pattern)
            if b":done:" not in name
        ]
    assert not leftover, f"{len(leftover)} keys are left, such as {leftover[0]!r}"
    return rows(runs)


def publish(url: str, client: redis.Redis) -> list[str]:
    """Publish the messages of all runs, and keep them aside; return under which names."""
    app = make_app(url, url)
    stocks = []
    with app.producer_pool.acquire(block=True) as producer:
        for number, name in enumerate(RUNS):
            variant = VARIANTS[name]
            hot = [f"{number}:hot:{'' if variant.one_key else n}" for n in range(variant.hot)]
            tasks = [(key, HOT_SECONDS) for key in hot]
            tasks += [(f"{number}:other:{n}", OTHER_SECONDS) for n in range(OTHERS)]
            random.Random(SEED).shuffle(tasks)
            for arguments in tasks:
                app.tasks[variant.task].apply_async(arguments, producer=producer)
            stocks.append(f"stock:{number}")
            client.rename(QUEUE, stocks[-1])
    app.close()
    return stocks


def measure(recorded: Recorded, client: redis.Redis, stock: str, variant: Variant) -> Run:
    tasks = variant.hot + OTHERS
    client.config_resetstat()
    client.rename(stock, QUEUE)
    noted = recorded.until(lambda noted: len(ran(noted)) >= tasks, RUN_LIMIT)
    time.sleep(SETTLE)
    noted += recorded.news()
    number = stock.partition(":")[2]
    noted = [delivery for delivery in noted if delivery.key.startswith(f"{number}:")]
    published = client.info("commandstats").get("cmdstat_lpush", {"calls": 0})["calls"]
    assert client.llen(QUEUE) == 0, "messages are left"
    return run_of(noted, published, tasks, parks=variant.task == "queue")


def run_of(noted: Sequence[Delivery], published: int, tasks: int, *, parks: bool) -> Run:
    bodies = Counter(delivery.task_id for delivery in noted if delivery.body_ended)
    assert len(bodies) == tasks, f"{len(bodies)} of {tasks} tasks have run"
    unrun = Counter(delivery.task_id for delivery in noted if not delivery.body_ended)
    hot = [delivery for delivery in noted if ":hot:" in delivery.key]
    in_turn = sorted((d.body_began, d.body_ended) for d in ran(hot) if d.key.endswith(":"))
    overlap = [one for one, two in pairwise(in_turn) if (one[1] or 0.0) > (two[0] or 0.0)]
    assert not overlap, f"{len(overlap)} bodies of the hot key ran beside another"
    began = min(delivery.started for delivery in noted)
    return Run(
        others=max(d.body_ended or 0.0 for d in noted if ":other:" in d.key) - began,
        all=max(d.body_ended or 0.0 for d in noted) - began,
        unrun=unrun.total(),
        wasted=sum(times - parks for times in unrun.values()),
        twice=bodies.total() - tasks,
        in_slot=sum(delivery.waited for delivery in hot),
        unrun_seconds=sum(delivery.waited for delivery in hot if not delivery.body_ended),
        published=published,
    )


def rows(runs: dict[str, list[Run]]) -> list[Row]:
    (ours,), alone = runs["queue"], runs["alone"]
    peers = [(name, runs[name][0]) for name in ("all keys differ", BY_HAND, WAIT)]
    beside_alone = ratios([ours.others] * len(alone), [run.others for run in alone])
    alone_s = f"{median(run.others for run in alone):.1f}"
    return [
        Row(
            "others done beside a hot key, s",
            f"{ours.others:.1f}",
            "others alone",
            alone_s,
            beside_alone,
            f"<= {TARGET}",
            reached=median(beside_alone) <= TARGET,
        ),
        *(
            Row("", f"{ours.others:.1f}", name, f"{run.others:.1f}", [ours.others / run.others])
            for name, run in peers
        ),
        *compare("  all done, s", ours.all, [(name, run.all) for name, run in peers]),
        Row(
            "  executions wasted",
            str(ours.wasted),
            BY_HAND,
            f"{runs[BY_HAND][0].wasted:,}",
            target="0",
            reached=not ours.wasted,
        ),
        Row("  bodies run twice", str(ours.twice), target="0", reached=not ours.twice),
        Row(
            "  deliveries of a hot task",
            f"{1 + ours.unrun / HOT:.2f}",
            BY_HAND,
            f"{1 + runs[BY_HAND][0].unrun / HOT:.2f}",
        ),
        *compare(
            "  seconds in the slot", ours.in_slot, [(name, run.in_slot) for name, run in peers]
        ),
        Row("    of them in parking", f"{ours.unrun_seconds:.1f}"),
        Row(
            "  messages published",
            f"{ours.published:,}",
            BY_HAND,
            f"{runs[BY_HAND][0].published:,}",
        ),
    ]


def compare(measured: str, ours: float, peers: Sequence[tuple[str, float]]) -> list[Row]:
    return [
        Row(measured if not nth else "", f"{ours:.1f}", name, f"{figure:.1f}", [ours / figure])
        for nth, (name, figure) in enumerate(peers)
    ]
