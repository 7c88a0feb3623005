"""
What it costs to have things: waiters, parked tasks, workers and leases of which nothing happens.

- A waiter: threads that wait for a lock that is held all the time, in four processes.
- A worker: with two pool processes and no task to run; ours beside a plain one, each with a Redis
  of its own for everything.
- A parked task: in the line of a lock that is held all the time.  Memory is what its message and
  its ticket take on the lock server, its message in the queue not counted.
- 10,000 leases: see `benchmarks.many_leases`.

Commands are those that clients send while nothing happens, counted with MONITOR.  Counted, not
timed: nothing of this has to take turns.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from benchmarks import many_leases
from benchmarks.contender import Job
from benchmarks.delay import delayed
from benchmarks.locks import OURS, PROCESSES, Fleet
from benchmarks.measuring import NETWORKS, Figure
from benchmarks.processes import processor_time
from benchmarks.recorded import worker as recorded_worker
from benchmarks.recorded_tasks import QUEUE
from benchmarks.tasks import FLOOR, send, took, worker
from celery_dislock import Dislock
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

    import redis

WAITER, WORKER = "A waiter", "An idle worker"
TICKETS, LEASES = "1,000 parked tasks", "10,000 leases"
COMMANDS, CORE = "commands in 10 s", "% of a core"
NETWORK = "0 ms"  # nothing here waits for one
WAITERS = 200
PARKED = 1_000
WINDOW = 60.0  # seconds: each waiter has asked again two or three times
PER = 10.0  # seconds
SETTLE = 5.0  # seconds in which what has just begun comes to rest
LIMIT = 90.0  # seconds until all tasks must be parked


def measure(folder: Path) -> list[Figure]:
    return [
        *of_waiters(folder / "waiters"),
        *of_workers(folder / "workers"),
        *of_parked(folder / "parked"),
        *of_leases(folder / "leases"),
    ]


def figure(table: str, measured: str, variant: str, value: float, network: str = NETWORK) -> Figure:
    return Figure(table, measured, variant, network, [value])


def commands(clients: list[redis.Redis]) -> list[float]:
    """Count what the clients of each server send in `PER` seconds."""
    counted = []
    with ExitStack() as stack:
        monitors = [stack.enter_context(client.monitor()) for client in clients]
        time.sleep(WINDOW)
        for client, monitor in zip(clients, monitors, strict=True):
            client.echo("end")
            sent = 0
            while not (seen := monitor.next_command())["command"].startswith("ECHO"):
                sent += seen["client_type"] != "lua"
            counted.append(sent / WINDOW * PER)
    return counted


def of_waiters(folder: Path) -> list[Figure]:
    with RedisServer(folder) as server, server.client() as client, ExitStack() as stack:
        fleet = Fleet(OURS, server.url, PROCESSES, stack)
        dislock = Dislock.from_url(server.url)
        now = time.monotonic()
        job = Job("bench-waiters", contenders=WAITERS, begin=now, end=now)  # nobody has a turn
        with dislock.lock(job.key):
            before = client.info("memory")["used_memory"]
            fleet.start(job)
            while client.info("clients")["blocked_clients"] < WAITERS:
                time.sleep(0.1)
            memory = client.info("memory")["used_memory"] - before
            sent = commands([client])
        fleet.turns(job)
    return [
        figure(WAITER, COMMANDS, OURS, sent[0] / WAITERS),
        figure(WAITER, "bytes of Redis, with its connection", OURS, memory / WAITERS),
    ]


def of_workers(folder: Path) -> list[Figure]:
    figures = []
    with ExitStack() as stack:
        clients, processes, variants = [], [], (FLOOR, OURS)
        for variant in variants:
            server = stack.enter_context(RedisServer(folder / variant))
            client = stack.enter_context(server.client(socket_timeout=None))
            running = stack.enter_context(worker(variant, server.url, folder / variant))
            send(variant, server.url, 20)  # what a pool process does once only is done
            took(client)
            clients.append(client)
            processes.append(psutil.Process(running.pid))
        time.sleep(SETTLE)
        before = list(map(processor_time, processes))
        sent = commands(clients)
        after = map(processor_time, processes)
        used = [now - then for now, then in zip(after, before, strict=True)]
        for variant, number, seconds in zip(variants, sent, used, strict=True):
            figures.append(figure(WORKER, COMMANDS, variant, number))
            figures.append(figure(WORKER, CORE, variant, 100 * seconds / WINDOW))
    return figures


def of_parked(folder: Path) -> list[Figure]:
    with (
        RedisServer(folder / "broker") as broker,
        RedisServer(folder / "locks") as locks,
        locks.client() as client,
        recorded_worker(folder, broker.url, locks.url, 2) as recorded,
        recorded.app.dislock.lock("parked"),
    ):
        time.sleep(SETTLE)
        before, used = memory(client), recorded.cpu()
        without = commands([client])
        used_without = recorded.cpu() - used
        for _ in range(PARKED):
            recorded.app.tasks["queue"].apply_async(("parked",))
        recorded.until(lambda noted: len(noted) >= PARKED, LIMIT)
        in_line = memory(client) - before
        time.sleep(SETTLE)
        used = recorded.cpu()
        sent = commands([client])
        used_with = recorded.cpu() - used
        with broker.client() as messages:
            assert not messages.llen(QUEUE)
    return [
        figure(TICKETS, "bytes of Redis each, with its message", OURS, in_line / PARKED),
        figure(TICKETS, COMMANDS, OURS, sent[0] - without[0]),
        figure(
            TICKETS,
            CORE,
            OURS,
            100 * (used_with - used_without) / WINDOW,
        ),
    ]


def memory(client: redis.Redis) -> int:
    """Return the bytes that all keys of a server take."""
    pipeline = client.pipeline(transaction=False)
    for name in client.scan_iter(count=PARKED):
        pipeline.memory_usage(name, samples=0)
    return sum(pipeline.execute())


def of_leases(folder: Path) -> list[Figure]:
    holders = (many_leases.hold_ours, many_leases.hold_bare, many_leases.hold_peer)
    figures = []
    with RedisServer(folder) as server:
        for network, seconds in NETWORKS.items():
            with delayed(server.url, seconds) as url:
                # The others stand beside ours for the CPU, which is the same at any network.
                held = many_leases.in_processes(url, *holders[: 1 if seconds else None])
            ours = held[0]
            assert not ours.lost, f"{ours.lost} leases are lost"
            assert ours.latest is not None
            name = f"{OURS}, network {network}"
            names = (name, "EVALSHA", f"python-redis-lock, {many_leases.PEER_LOCKS}")
            figures += [
                figure(LEASES, CORE, name, 100 * ours.cpu),
                figure(LEASES, "latest renewal, s after due", name, ours.latest),
            ]
            for variant, one in zip(names, held, strict=False):
                figures.append(figure(LEASES, "threads", variant, one.threads))
                figures.append(figure(LEASES, "CPU per renewal, us", variant, one.per_renewal))
    return figures
