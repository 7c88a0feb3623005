"""One run: servers, processes that work, faults, and what is left at the end."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import redis
from celery.states import READY_STATES
from redis.backoff import NoBackoff
from redis.retry import Retry

from proof.checker import Verdict, check
from proof.controls import CONTROLS
from proof.files import SharedFile
from proof.history import History, read
from proof.nemesis import LONG_PAUSE, SPARES_PLACES, Fault, Group, make_faults, of_processes
from proof.processes import LOCKING, SENDING, WORKER, Processes
from proof.servers import KINDS, ttls
from proof.site import Site
from tests.acceptance.rabbitmq import find_rabbitmq, running
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from proof.servers import LockServers
    from tests.acceptance.rabbitmq import RabbitServer

TIMEOUT = 1.0  # seconds of a lease
ROUND = 20.0  # seconds after which a control is looked at, whether it was caught
QUIET = 30.0  # seconds in which no task ends, after which those that are left are lost
START_WITHIN = 90.0  # seconds until the processes work
ASKED = 0.05  # seconds between two questions to the lock server, whether it answers
ANSWERS_WITHIN = 0.1  # seconds
LEFT_WITHIN = 120.0  # seconds until what stays for a dead process has expired


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    kind: str = "redis",
    control: str = "",
    enough: Callable[[Verdict], bool] | None = None,
) -> Verdict:
    """
    Run the workloads under faults, and return what their history shows.

    Args:
        folder: For the history, the logs and the servers.
        seconds: How long there are faults.
        seed: Decides the faults.
        kind: Of the lock server, as :data:`proof.servers.KINDS` has it.
        control: What is broken on purpose; empty: nothing is.
        enough: Asked now and then; the run ends early when the verdict is enough.
    """
    programs = find_rabbitmq()
    assert programs is not None, "the proof needs RabbitMQ: a Redis broker itself loses messages"
    if control and CONTROLS[control].promise == "nothing lost":
        seconds = min(seconds, ROUND)  # whether a task is lost is seen when all others have ended
    folder.mkdir(parents=True)
    path = folder / "history"
    history = History(path, "run")
    with ExitStack() as stack:
        broker = stack.enter_context(running(programs, folder / "broker"))
        results = stack.enter_context(RedisServer(folder / "results"))
        servers = stack.enter_context(KINDS[kind](folder / "locks"))
        site = Site(
            url=servers.url,
            options=servers.options,
            has_lines=servers.has_lines,
            has_pairs=servers.has_pairs,
            broker=broker.url,
            results=results.url,
            folder=str(folder),
            seed=seed,
            timeout=TIMEOUT,
            control=control,
        )
        with Processes(WORKER, 2, site, history) as workers:
            with (
                Processes(LOCKING, 2, site, history) as locking,
                Processes(SENDING, 1, site, history) as sending,
            ):
                chances = [random.Random(f"{seed}:{number}") for number in range(3)]
                victims = (workers, locking, sending)
                of_servers = servers.faults(chances[1], TIMEOUT)
                shown_by = CONTROLS[control].shown_by if control else ""
                groups = (
                    Group(chances[0], of_processes(victims, chances[0], TIMEOUT)),
                    Group(chances[1], [one for one in of_servers if shown_by in {"", one.name}]),
                    Group(chances[2], [restart(broker)], LONG_PAUSE),
                )
                stack.enter_context(noting_answers(servers, history))
                wait_for_work(path)
                until = time.monotonic() + seconds
                while (now := time.monotonic()) < until:
                    make_faults(groups, history, min(until, now + ROUND) if enough else until)
                    if enough and enough(check(read(path))):
                        return check(read(path))
            note_outcomes(history, path, results, workers)
        if control:
            return check(read(path))
        for file in sorted(folder.glob("elements-*")):
            if not file.suffix:
                elements = SharedFile(file, fenced=False).read()
                history.add("file", file.name, "end", elements=elements)
        for key in left_behind(servers):
            history.add("key", key, "left")
    history.close()
    return check(read(path))


@contextmanager
def noting_answers(servers: LockServers, history: History) -> Iterator[None]:
    """Note now and then that the lock server answers, by which its own stalls are known."""
    over = threading.Event()
    urls = servers.proxied or [node.url for node in servers.nodes]
    once = {"socket_timeout": ANSWERS_WITHIN, "retry": Retry(NoBackoff(), 0)}
    clients = [redis.Redis.from_url(url, **once) for url in urls]

    def ask() -> None:
        while not over.wait(ASKED):
            with suppress(redis.RedisError):
                for client in clients:
                    client.ping()
                history.add("server", "all of it", "answers")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for client in clients:
            client.close()


def wait_for_work(path: Path) -> None:
    """Wait until tasks run and locks are taken: what only starts cannot go wrong."""
    until = time.monotonic() + START_WITHIN
    while time.monotonic() < until:
        if {("task", "begin"), ("operation", "ok")} <= {(e.what, e.kind) for e in read(path)}:
            return
        time.sleep(0.5)


def restart(broker: RabbitServer) -> Fault:
    """Return the end of the broker, which then delivers again what was not acknowledged."""
    return Fault("restart the broker", broker.restart, {"redelivers": True, **SPARES_PLACES})


def note_outcomes(history: History, path: Path, results: RedisServer, workers: Processes) -> None:
    """Wait until all tasks have ended, and note the outcome of each that has one."""
    tasks = {e.about for e in read(path) if e.what == "task" and e.kind == "sent"}
    until = time.monotonic() + QUIET
    with results.client(decode_responses=True) as client:
        while tasks and time.monotonic() < until:
            workers.revive()
            for task in sorted(tasks):
                result = json.loads(client.get(f"celery-task-meta-{task}") or "{}")
                if result.get("status") in READY_STATES:
                    history.add("task", task, "outcome", state=result["status"])
                    tasks.discard(task)
                    until = time.monotonic() + QUIET
            time.sleep(0.5)


def left_behind(servers: LockServers) -> list[str]:
    """
    Return the keys that are left; waits for those that expire soon.

    What is kept for a copy of a message that may still come expires later, and is no rest.
    """
    until = time.monotonic() + LEFT_WITHIN
    while True:
        left = [key for key, ttl in ttls(servers) if ttl <= LEFT_WITHIN * 1000]
        if not left or time.monotonic() > until:
            return left
        time.sleep(1.0)
