"""
Send twenty edits of each of thirty documents; count the runs, and see which edition runs last.

One worker runs them, with one to eight processes, and then with eight threads.  The debounce
(``lock_on_duplicate="replace"`` and a countdown of one second) is sent in two ways: the edits of a
document at once, all documents within a second; and the documents in turn, so that each burst takes
the second.  To reach, with any number of slots: one run of each burst, and of its last edition.

Beside it is the coalescing in a line for one (``lock_queue_limit=1``, ``lock_queue_overflow=
"replace"``), with the edits of a document at once.  Sent in turn, no two edits of a document would
meet at its lock, and all twenty would run.  Of those in line, the one that was sent last counts, by
the note ``sent``.  So the last edition always runs.  An older one runs after it if it
comes to the lock when the last has its turn already.

In the line "without the note" an app without celery-dislock sends the same tasks by their name.
There, the last that comes to the lock counts.

The bodies note their editions in the order in which they have the lock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery, states

from benchmarks.processes import started
from benchmarks.report import Row
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import redis

POOLS = (*(("prefork", slots) for slots in range(1, 9)), ("threads", 8))
EDITIONS = range(1, 21)
DOCS = range(30)
WITHIN = 1.0  # seconds in which all edits of all documents are sent, if the machine is fast enough
COUNTDOWN = 1.0  # seconds
STARTING = 30.0  # seconds that a worker is given to start
ENDING = 180.0  # seconds until all tasks have ended; with one slot, 600 bodies take thirty
LOOK_EVERY = 0.1  # seconds
DEBOUNCE, COALESCE, UNTIMED = "debounce", "queue, limit 1", "without the note"


class Burst(NamedTuple):
    """
    How a burst ended.

    Attributes:
        runs: How many it had.
        older_last: Whether the last of them was not of the last edition.
        lost: Whether the last edition had none.
    """

    runs: int
    older_last: bool
    lost: bool

    @classmethod
    def of(cls, editions: Sequence[int]) -> Burst:
        """Tell it by the editions that ran, in order."""
        newest = EDITIONS[-1]
        return cls(len(editions), [*editions][-1:] != [newest], newest not in editions)


def run(folder: Path) -> list[Row]:
    rows = []
    with RedisServer(folder) as server, server.client() as client:
        os.environ["BURSTS_REDIS"] = server.url
        for pool, slots in POOLS:
            with worker(folder, client, pool, slots):
                rows += rows_of(f"{pool} {slots}", measure(client, f"{pool}-{slots}"))
            left = [name for name in client.scan_iter("dislock:{*}*") if stays(client, name)]
            assert not left, f"{len(left)} keys are left, such as {left[0]!r}"
    return rows


def stays(client: Any, name: bytes) -> bool:
    """Tell whether a key is more than what late copies of messages are compared with."""
    if name.endswith(b":unique"):
        return not client.get(name).startswith(b"1 - ")
    return b":done:" not in name


def rows_of(pool: str, bursts: dict[str, list[Burst]]) -> list[Row]:
    ours = bursts[DEBOUNCE]
    one = Burst(runs=1, older_last=False, lost=False)
    return [
        Row(
            f"20 edits, {pool}: runs (most); older last; newest lost",
            shown(ours),
            COALESCE,
            shown(bursts[COALESCE]),
            target="1 (1); 0; 0",
            reached=all(burst == one for burst in ours),
        ),
        Row("", "", UNTIMED, shown(bursts[UNTIMED])),
    ]


def shown(bursts: list[Burst]) -> str:
    runs = [burst.runs for burst in bursts]
    older, lost = sum(burst.older_last for burst in bursts), sum(burst.lost for burst in bursts)
    return f"{mean(runs):.2f} ({max(runs)}); {older}; {lost} of {len(bursts)}"


def measure(client: redis.Redis, name: str) -> dict[str, list[Burst]]:
    """Send all bursts in each way, one way after the other."""
    from benchmarks import bursts_tasks as tasks  # noqa: PLC0415  # reads the server's address

    def debounce(doc: str, edition: int) -> Any:
        return tasks.debounce.apply_async((doc, edition), countdown=COUNTDOWN)

    def untimed(doc: str, edition: int) -> Any:
        return stranger.send_task(tasks.coalesce.name, (doc, edition))

    stranger = Celery("stranger", broker=tasks.URL, set_as_current=False)
    stranger.conf.task_default_queue = tasks.QUEUE
    at_once = [(f"{name}:{doc}", edition) for doc, edition in product(DOCS, EDITIONS)]
    in_turn = [(f"{name}:{doc}", edition) for edition, doc in product(EDITIONS, DOCS)]
    with stranger:
        return {
            DEBOUNCE: send(client, debounce, at_once) + send(client, debounce, in_turn),
            COALESCE: send(client, tasks.coalesce.delay, at_once),
            UNTIMED: send(client, untimed, at_once),
        }


def send(
    client: redis.Redis, sends: Callable[[str, int], Any], edits: Sequence[tuple[str, int]]
) -> list[Burst]:
    """Send these edits, and wait until all have ended."""
    from benchmarks.bursts_tasks import RUNS  # noqa: PLC0415  # as above

    client.delete(RUNS)
    began, ids = time.monotonic(), []
    for nth, edit in enumerate(edits):
        time.sleep(max(0.0, began + WITHIN * nth / len(edits) - time.monotonic()))
        ids.append(sends(*edit).id)
    ends = wait_until_ended(client, ids)
    runs: dict[str, list[int]] = {doc: [] for doc, _ in edits}
    for note in client.lrange(RUNS, 0, -1):
        assert isinstance(note, bytes)
        doc, edition = note.decode().split()
        runs[doc].append(int(edition))
    successes = ends.pop(states.SUCCESS)
    assert set(ends) <= {states.REVOKED}, f"tasks ended otherwise: {ends}"
    assert successes == sum(map(len, runs.values())), f"{successes} successes of {runs}"
    return [Burst.of(editions) for editions in runs.values()]


def wait_until_ended(client: redis.Redis, ids: Sequence[str]) -> Counter[str]:
    """Wait until all these tasks have ended; return how many in which state."""
    ends: Counter[str] = Counter()
    deadline, left = time.monotonic() + ENDING, list(ids)
    while left:
        assert time.monotonic() < deadline, f"{len(left)} tasks do not end, such as {left[0]}"
        time.sleep(LOOK_EVERY)
        stored = client.mget([f"celery-task-meta-{task_id}" for task_id in left])
        found = [json.loads(result)["status"] if result else states.PENDING for result in stored]
        ends.update(state for state in found if state in states.READY_STATES)
        left = [
            task_id
            for task_id, state in zip(left, found, strict=True)
            if state not in states.READY_STATES
        ]
    return ends


@contextmanager
def worker(folder: Path, client: redis.Redis, pool: str, slots: int) -> Iterator[None]:
    """Run a worker, and wait until it has run a task; it is stopped in the end."""
    from benchmarks import bursts_tasks as tasks  # noqa: PLC0415  # as above

    command = [sys.executable, "-m", "celery", "-A", "benchmarks.bursts_tasks"]
    # Results for the worker only: the sender would subscribe to each.
    command += ["--result-backend", tasks.URL, "worker"]
    command += ["--dislock", "--pool", pool, "--concurrency", str(slots)]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command += ["--loglevel", "WARNING"]
    log = folder / f"{pool}-{slots}.log"
    with started(command, log):
        client.delete(tasks.RUNS)
        tasks.coalesce.delay("first", 1)
        if client.blpop([tasks.RUNS], timeout=STARTING) is None:
            raise RuntimeError(f"the worker does not start:\n{log.read_text()}")
        yield
