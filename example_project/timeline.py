"""
What happened to which lock, and when: recorded by all processes in one file, and read back.

Signals of celery-dislock say what happened to a lock.  Tasks say by themselves when their body
runs, so that two at a time show even where the locks say nothing.  Every event is one line of JSON,
appended by one write: lines of several processes never mix.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery.signals import worker_ready

from celery_dislock import signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from celery import Task
    from celery.worker import WorkController

    from celery_dislock import Conflict, Lease

ENDS = ("released", "lost", "killed")  # events after which a lock is held no more
_files: list[Path] = []  # at most one: where this process records


def record_to(file: Path) -> None:
    """Record what happens in this process, and in those forked from it, from now on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _files[:] = [file]
    signals.lock_acquired.connect(_acquired)
    signals.lock_renewed.connect(_renewed)
    signals.lock_released.connect(_released)
    signals.lock_lost.connect(_lost)
    signals.lock_capped.connect(_capped)
    signals.lock_conflict.connect(_conflict)
    worker_ready.connect(_ready)


def record(what: str, **details: Any) -> None:
    """Append an event, with the time; does nothing where none are recorded."""
    for file in _files:
        line = json.dumps({"at": time.time(), "what": what, **details}) + "\n"
        target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(target, line.encode())
        finally:
            os.close(target)


@contextmanager
def running(task: Task, key: str) -> Iterator[None]:
    """Record that a body runs: what it does, it does for this key."""
    request = task.request
    body = {"key": key, "id": request.id, "worker": request.hostname, "pid": os.getpid()}
    record("started", **body)
    try:
        yield
    finally:
        record("ended", **body)


def read(file: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the events from the moment *since* (Unix time) on, in the order of their times."""
    if not file.exists():
        return []
    lines = file.read_text("utf-8").split("\n")[:-1]  # the last may be half written
    events = [json.loads(line) for line in lines]
    return sorted((e for e in events if e["at"] >= since), key=lambda event: event["at"])


@dataclass
class Span:
    """
    A time for which a lock was held, or for which a body ran.

    Attributes:
        start: Unix time.
        end: Unix time; None while it lasts.
        how: The event that ended it; empty while it lasts.
        renewals: Unix times.
    """

    key: str
    worker: str
    pid: int
    task_id: str
    start: float
    end: float | None = None
    how: str = ""
    renewals: list[float] = field(default_factory=list)
    capped: float | None = None


def holds(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return who held which lock from when to when, in the order of their starts."""
    return _spans(events, "acquired", ENDS)


def bodies(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return which bodies ran for which key from when to when, in the order of their starts."""
    return _spans(events, "started", ("ended", "killed"))


def _spans(events: Iterable[dict[str, Any]], first: str, ends: tuple[str, ...]) -> list[Span]:
    spans: list[Span] = []
    lasting: dict[tuple[str, str], Span] = {}
    for event in events:
        what, at, name = event["what"], event["at"], (event.get("key", ""), event.get("id", ""))
        if what == first:
            span = Span(event["key"], event["worker"], event["pid"], event["id"], at)
            lasting[name] = span
            spans.append(span)
        elif what in ends and name in lasting:
            span = lasting.pop(name)
            span.end, span.how = at, what
        elif what == "renewed" and name in lasting:
            lasting[name].renewals.append(at)
        elif what == "capped" and name in lasting:
            lasting[name].capped = at
    return spans


def most_at_once(spans: Iterable[Span]) -> int:
    """Return how many spans of the same key there were at a time, at the worst moment."""
    changes = []
    for span in spans:
        changes.append((span.start, 1, span.key))
        if span.end is not None:
            changes.append((span.end, -1, span.key))
    now: dict[str, int] = {}
    most = 0
    for _, change, key in sorted(changes):
        now[key] = now.get(key, 0) + change
        most = max(most, now[key])
    return most


def _of(lease: Lease) -> dict[str, Any]:
    who = {name: lease.holder[name] for name in ("id", "worker", "pid")}
    return {"key": lease.key, **who}


def _acquired(lease: Lease, **_: Any) -> None:
    record("acquired", **_of(lease), token=lease.token)


def _renewed(lease: Lease, **_: Any) -> None:
    record("renewed", **_of(lease), renewals=lease.renewals)


def _released(lease: Lease, *, expiring: bool, **_: Any) -> None:
    record("released", **_of(lease), expiring=expiring)


def _lost(lease: Lease, reason: str, **_: Any) -> None:
    record("lost", **_of(lease), reason=reason)


def _capped(lease: Lease, **_: Any) -> None:
    record("capped", **_of(lease), renewals=lease.renewals)


def _conflict(conflict: Conflict, task_id: str, **_: Any) -> None:
    holder = conflict.holder.get("id")
    record("conflict", key=conflict.key, id=task_id, held_by=holder, remaining=conflict.remaining)


def _ready(sender: WorkController, **_: Any) -> None:
    record("ready", worker=sender.hostname, pid=os.getpid())
