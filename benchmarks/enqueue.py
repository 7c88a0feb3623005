"""
Send unique tasks, and have them refused, beside celery-singleton's and celery-once's ``delay()``.

All four apps, a plain one among them, have the same Redis as the broker and for what they keep, and
no result backend: a result would cost a subscription for each message sent, the same for all.  The
task has one argument, which is its key; the peers are left to use all arguments, which is the
faster way for them and the same key.  To reach, as ``delay()`` per second in one thread: 1.2 times
each peer's when the message is sent, with a new key each time; and each peer's when it is refused,
because a message of that key waits.

A refused ``delay()`` either returns (ours and celery-singleton's the first message's result,
celery-once's none) or raises an error; ours is compared with the peers' doing the same.

The floor is ``delay()`` of a plain task after a PING on a bare socket: no reservation can be faster
than one round trip.  The message's header, the key and the second command come on top of it.
"""

from __future__ import annotations

import socket
import time
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton
from celery_singleton.exceptions import DuplicateTaskError as SingletonDuplicate

from benchmarks.acquire_release import LOOPBACK
from benchmarks.report import Row, ratios, take_turns
from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis
    from celery import Task

SENT = 1.2  # times the peer's per second
REFUSED = 1.0
EXPIRE = 3600  # seconds that each key is reserved for
CALLS = 100  # of delay() in a round: some 50 ms
ROUNDS = 60
OURS, SINGLETON, ONCE = "ours", "celery-singleton", "celery-once"
PLAIN, FLOOR = "plain Celery", "PING, plain Celery"
DUPLICATE = (DuplicateTaskError, SingletonDuplicate, AlreadyQueued)
QUEUE = "edits"
PEERS = (SINGLETON, ONCE)


def run(folder: Path) -> list[Row]:
    with (
        RedisServer(folder) as server,
        server.client() as client,
        socket.create_connection((LOOPBACK, int(server.port or 0))) as wire,
    ):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tasks = {
            (name, raises): task_of(name, server.url, raises=raises)
            for name in (OURS, *PEERS)
            for raises in (False, True)
        }
        plain = task_of(PLAIN, server.url)
        sent = {name: sending(tasks[name, False], client) for name in (OURS, *PEERS)}
        sent[PLAIN] = sending(plain, client)
        sent[FLOOR] = sending(plain, client, before=lambda: ping(wire))
        refused = {
            f"{name} {raises}": refusing(tasks[name, raises], client, raises=raises)
            for name in (OURS, *PEERS)
            for raises in (False, True)
        }
        take_turns({**sent, **refused}, 3)  # connections are made, scripts loaded, caches warm
        sends = take_turns(sent, ROUNDS)
        refusals = take_turns(refused, ROUNDS)
        for task in {**tasks, (PLAIN, False): plain}.values():
            task.app.close()
    return [
        *(
            row("delay() sent, per s", sends[OURS], peer, sends[peer], f">= {SENT}", SENT)
            for peer in PEERS
        ),
        row("  beside plain delay()", sends[OURS], PLAIN, sends[PLAIN]),
        row("  beside a bare PING and plain delay()", sends[OURS], FLOOR, sends[FLOOR]),
        *(row(f"  (the latter beside {peer})", sends[FLOOR], peer, sends[peer]) for peer in PEERS),
        *(
            row(
                f"delay() refused, {'an error' if raises else 'returns'}, per s",
                refusals[f"{OURS} {raises}"],
                peer,
                refusals[f"{peer} {raises}"],
                f">= {REFUSED:g}",
                REFUSED,
            )
            for raises in (False, True)
            for peer in PEERS
        ),
    ]


def row(
    measured: str,
    ours: list[float],
    peer: str,
    peers: list[float],
    target: str = "",
    least: float | None = None,
) -> Row:
    faster = ratios(ours, peers)
    return Row(
        measured,
        f"{median(ours):,.0f}",
        peer,
        f"{median(peers):,.0f}",
        faster,
        target,
        reached=None if least is None else median(faster) >= least,
    )


def task_of(name: str, url: str, *, raises: bool = False) -> Task:
    """Make an app with one task, unique by its argument in the way of *name*."""
    app = Celery(name, broker=url, set_as_current=False)
    app.conf.task_default_queue = QUEUE
    app.conf.task_ignore_result = True
    options: dict[str, Any] = {}
    if name == OURS:
        Dislock(app)
        options["base"] = SingletonTask
        options["lock_key"] = "edit:<doc>"
        options["lock_unique_until"] = "end"
        options["lock_unique_for"] = EXPIRE
        options["lock_on_duplicate"] = "raise" if raises else "return"
    elif name == SINGLETON:
        app.conf.singleton_backend_url = url
        options["base"] = Singleton
        options["lock_expiry"] = EXPIRE
        options["raise_on_duplicate"] = raises
    elif name == ONCE:
        settings = {"url": url, "default_timeout": EXPIRE}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        options["base"] = QueueOnce
        options["once"] = {"graceful": not raises}

    @app.task(name="bench.edit", shared=False, **options)
    def edit(doc: int) -> None:
        """Never run."""

    app.finalize()
    made: Task = app.tasks["bench.edit"]
    return made


def clear(client: redis.Redis) -> None:
    """Delete the messages and the reservations, but not the bindings of the broker."""
    client.delete(*(key for key in client.scan_iter() if not key.startswith(b"_kombu")), "nothing")


def ping(wire: socket.socket) -> None:
    wire.sendall(b"PING\r\n")
    wire.recv(64)


def sending(
    task: Task, client: redis.Redis, before: Callable[[], None] | None = None
) -> Callable[[], float]:
    """Make what sends a round of messages, a new key each; returns how many per second."""
    numbers = count()

    def measure() -> float:
        clear(client)
        docs = [next(numbers) for _ in range(CALLS)]
        delay = task.delay
        began = time.perf_counter()
        for doc in docs:
            if before:
                before()
            delay(doc)
        took = time.perf_counter() - began
        assert client.llen(QUEUE) == CALLS, f"{client.llen(QUEUE)} messages"
        return CALLS / took

    return measure


def refusing(task: Task, client: redis.Redis, *, raises: bool) -> Callable[[], float]:
    """Make what is refused a round of times, after one message; returns how many per second."""

    def measure() -> float:
        clear(client)
        task.delay(1)
        delay, errors = task.delay, 0
        began = time.perf_counter()
        for _ in range(CALLS):
            try:
                delay(1)
            except DUPLICATE:
                errors += 1
        took = time.perf_counter() - began
        assert client.llen(QUEUE) == 1, f"{client.llen(QUEUE)} messages: it was not refused"
        assert errors == CALLS * raises, f"{errors} errors"
        return CALLS / took

    return measure
