"""
Time what the guard adds to a task that does nothing, beside its two round trips.

One task twice, with ``lock_key="export:<corp_id>:<kind>"`` and without, in this process: through
Celery's tracer, as a pool process runs it with the headers of a real message; and the guard alone
around the bare body.  To reach: under 30 us per task for what the guarded one takes longer.

Microseconds are CPU time of all threads of this process, so that what else the machine does is not
counted as the guard's.

The round trips are left out by a store that grants at once, in the place of ours.  All the rest
counts: the key, the claim, the holder's JSON, the lease, the running watchdog, the interpreter's
calls.  What a store does for a bare call does not: packing the command, the wait, reading the
reply.

The last line is the same against a real server, beside the unguarded task and two bare calls of the
store in turns: in turns those cost more than each by itself, presumably because caches go cold in
the wait.  The guard's would, too, which can be why this figure is higher than the first.
"""

from __future__ import annotations

import inspect
import time
import uuid
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.app.task import Context
from celery.app.trace import build_tracer

from benchmarks.report import Row, take_turns
from celery_dislock import Dislock
from celery_dislock.keys.builders import key_builder
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.servers.records import write_holder
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from celery import Task

KEY = "export:<corp_id>:<kind>"
ARGS = (4711, "monthly")
KWARGS = {"corp_id": 4711, "kind": "monthly"}
TARGET = 30.0  # us
CALLS = 50  # of one variant in a round: some 3 ms, so that few rounds are interrupted
ROUNDS = 600
WIRE_ROUNDS = 300
WARMING = 5  # rounds: connections are made, scripts loaded, caches warm


class AtOnce:
    """A store whose answers cost next to nothing."""

    server = "redis://at.once/0"

    def __init__(self) -> None:
        self.pairs = 0
        self._tokens = count(1)

    def acquire(self, _locks: Sequence[str], _owner: str, *_terms: Any, **_more: Any) -> Granted:
        """Grant the lock."""
        return Granted((next(self._tokens),))

    def release(self, _locks: Sequence[str], _owner: str, *_terms: Any) -> bool:
        """Say that the lease was there."""
        self.pairs += 1
        return True

    def renew(self, leases: Sequence[object], **_within: float) -> list[bool]:
        """Renew what the watchdog wants renewed."""
        return [True] * len(leases)


class Tasks:
    """
    The task with its guard and without, on one store.

    Args:
        url: Of a lock server; nobody connects to it here.
        store: What is asked instead; None: the server.
    """

    def __init__(self, url: str, store: AtOnce | None = None) -> None:
        self.app = Celery("bench", broker=url, set_as_current=False)
        self.app.conf.task_ignore_result = True
        self.app.conf.dislock_enabled = True
        process = Dislock(self.app).runtime.process
        if store is not None:
            process.store = store  # type: ignore[assignment]
            process.watchdog = Watchdog(store)  # type: ignore[arg-type]
        self.store = process.store
        process.watchdog.start()
        self.app.task(name="bench.export", lock_key=KEY)(export)
        self.app.task(name="bench.bare")(export)
        self.app.finalize()
        # As a worker gets them; what the decorator returns is a proxy, and each use of it costs.
        self.guarded: Task = self.app.tasks["bench.export"]
        self.unguarded: Task = self.app.tasks["bench.bare"]
        assert hasattr(self.guarded, "dislock_guard")
        assert not hasattr(self.unguarded, "dislock_guard")

    def traced(
        self, task: Task, args: Sequence[Any] = ARGS, kwargs: Mapping[str, Any] | None = None
    ) -> Callable[[], object]:
        """Make a call of the task as a pool process goes about it."""
        task_id, kwargs = str(uuid.uuid4()), kwargs or {}
        message = self.app.amqp.as_task_v2(task_id, task.name, args, kwargs)
        request = {
            **message.headers,
            "hostname": "celery@bench",
            "delivery_info": {"exchange": "", "routing_key": "bench", "redelivered": False},
            "args": args,
            "kwargs": kwargs,
            "is_eager": False,
        }
        trace = build_tracer(task.name, task, app=self.app, hostname="celery@bench")

        def call() -> None:
            failed, value, *_ = trace(task_id, args, kwargs, request)
            assert not failed, value

        return call

    def alone(self) -> Callable[[], object]:
        """Make a call of the guard, around the bare body."""
        task, guard = self.guarded, self.guarded.dislock_guard
        request = Context(id=str(uuid.uuid4()), hostname="celery@bench", called_directly=False)
        return lambda: guard.run(task, request, export, ARGS, {})

    def bare_calls(self) -> Callable[[], object]:
        """Make the two calls of the store, and nothing around them; what they send is ready."""
        options, timeout = self.guarded.dislock_guard.options, self.guarded.dislock_guard.timeout
        task_id, names = str(uuid.uuid4()), ["dislock:{export:4711:monthly}"]
        owner = f"{task_id}@celery@bench:12345/01234567.1"
        holder = {"task": "bench.export", "id": task_id, "worker": "celery@bench", "pid": 12345}
        said, store = write_holder(holder), self.store

        def call() -> None:
            assert isinstance(
                store.acquire(names, owner, timeout, said, terms=options.terms), Granted
            )
            assert store.release(names, owner)

        return call


def export(corp_id: int, kind: str) -> None:
    """Do nothing."""


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        at_once = AtOnce()
        without_wire = Tasks(server.url, at_once)
        on_wire = Tasks(server.url)
        assert isinstance(on_wire.store, Store)
        key = key_builder(KEY, signature=inspect.signature(export), task_name="bench.export").key

        variants = {
            "traced": timed(without_wire.traced(without_wire.guarded)),
            "by keyword": timed(without_wire.traced(without_wire.guarded, (), KWARGS)),
            "unguarded": timed(without_wire.traced(without_wire.unguarded)),
            "alone": timed(without_wire.alone()),
            "body": timed(lambda: export(*ARGS)),
            "key": timed(lambda: key(ARGS, {})),
        }
        bare_task, bare_calls = on_wire.traced(on_wire.unguarded), on_wire.bare_calls()
        wired = {
            "traced": timed(on_wire.traced(on_wire.guarded)),
            "bare": timed(lambda: (bare_task(), bare_calls())),
        }
        try:
            take_turns(variants, WARMING)
            before = at_once.pairs
            took = take_turns(variants, ROUNDS)
            locking = 3 * len(took["traced"])  # of six variants three lock
            assert at_once.pairs - before == locking * CALLS
            take_turns(wired, WARMING)
            client.config_resetstat()
            waited = take_turns(wired, WIRE_ROUNDS)
            scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert scripts == 2 * 2 * len(waited["traced"]) * CALLS, "not two round trips per task"
            assert not client.keys("dislock:*:holders")
        finally:
            on_wire.store.close()
    unguarded, body = took["unguarded"], took["body"]
    return [
        row("guard in Celery's tracer, us added", took["traced"], unguarded, "task", TARGET),
        row("  called by keyword", took["by keyword"], unguarded, "task", TARGET),
        row("guard alone, us added", took["alone"], body, "body", TARGET),
        Row("  of it the key", f"{median(took['key']):.1f}"),
        row(
            "  in the tracer, on a real server",
            waited["traced"],
            waited["bare"],
            "task + 2 bare calls",
        ),
    ]


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Make what measures microseconds per call."""

    def measure() -> float:
        began = time.process_time()
        for _ in range(CALLS):
            call()
        return 1e6 * (time.process_time() - began) / CALLS

    return measure


def row(
    measured: str,
    guarded: Sequence[float],
    without: Sequence[float],
    peer: str,
    target: float | None = None,
) -> Row:
    """Compare two figures of each round; the ratio is the whole one's to that without."""
    added = median(long - short for long, short in zip(guarded, without, strict=True))
    return Row(
        measured,
        f"{added:.1f}",
        peer,
        f"{median(without):.1f}",
        [long / short for long, short in zip(guarded, without, strict=True)],
        "" if target is None else f"< {target:g}",
        reached=None if target is None else added < target,
    )
