"""
Acquire and release an uncontended lock, one client over loopback TCP, beside redis-py's Lock.

Ours writes who holds the lock, hands out a fencing token and is kept by a running watchdog;
redis-py's sets a random value.  Both are measured with a new lock object for each pair, and with
one that is kept.  To reach, as pairs per second: 1.15 times redis-py's with new objects (aim 1.25),
1.2 times with kept ones (aim: 1.3), in two round trips; and 8 us of the server's time per script.

The floor is two PING round trips on a bare socket: no client can be faster than that.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import Row, ratios, take_turns
from celery_dislock import Dislock
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis

LOOPBACK = "127.0.0.1"
KEY = "export:7"
NEW, NEW_AIM = 1.15, 1.25
KEPT, KEPT_AIM = 1.2, 1.3
SCRIPT = 8.0  # microseconds of the server
TIMEOUT = 30.0  # seconds
PAIRS = 250  # of acquire and release, in a round: some 30 ms
ROUNDS = 120
SPEED_ROUNDS = 9
COUNTED = 200  # pairs whose commands are counted
PONG = 7  # bytes of the reply to PING


def run(folder: Path) -> list[Row]:
    with (
        RedisServer(folder) as server,
        server.client() as client,
        socket.create_connection((LOOPBACK, int(server.port or 0))) as wire,
    ):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dislock = Dislock.from_url(server.url)
        variants = {
            "new": rate(new(dislock)),
            "redis-py new": rate(redis_py(client)),
            "kept": rate(kept(dislock.lock(KEY))),
            "redis-py kept": rate(kept(client.lock(KEY, timeout=TIMEOUT))),
            "floor": rate(two_pings(wire)),
        }
        take_turns(variants, 3)  # connections are made, scripts loaded, caches warm
        pairs = take_turns(variants, ROUNDS)
        commands = {
            "ours": commands_per_pair(client, new(dislock)),
            "redis-py": commands_per_pair(client, redis_py(client)),
        }
        scripts = {
            "ours": server_time(client, new(dislock)),
            "redis-py": server_time(client, redis_py(client)),
        }
        dislock.close()

    speed = {name: median(figures) for name, figures in pairs.items()}
    rows = []
    for name, target, aim in (("new", NEW, NEW_AIM), ("kept", KEPT, KEPT_AIM)):
        faster = ratios(pairs[name], pairs[f"redis-py {name}"])
        rows.append(
            Row(
                f"acquire + release, {name} lock objects, pairs/s",
                f"{speed[name]:,.0f}",
                "redis-py Lock",
                f"{speed[f'redis-py {name}']:,.0f}",
                faster,
                f">= {target} (aim {aim})",
                reached=median(faster) >= target,
            )
        )
    return [
        *rows,
        Row(
            "  a pair with new objects, us",
            f"{1e6 / speed['new']:.0f}",
            "two bare PINGs",
            f"{1e6 / speed['floor']:.0f}",
            ratios(pairs["floor"], pairs["new"]),
        ),
        Row(
            "  commands per pair",
            in_words(commands["ours"]),
            "redis-py Lock",
            in_words(commands["redis-py"]),
            target="2 evalsha",
            reached=commands["ours"] == {"evalsha": 2.0},
        ),
        Row(
            "  server time per command, us",
            f"{scripts['ours']:.1f}",
            "redis-py Lock",
            f"{scripts['redis-py']:.1f}",
            [scripts["ours"] / scripts["redis-py"]],
            f"<= {SCRIPT:g} us",
            reached=scripts["ours"] <= SCRIPT,
        ),
    ]


def new(dislock: Dislock) -> Callable[[], None]:
    """One pair of ours, with a lock object of its own."""

    def pair() -> None:
        lock = dislock.lock(KEY)
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


def kept(lock: Any) -> Callable[[], None]:
    """One pair of a lock object that is used again, ours or redis-py's."""

    def pair() -> None:
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


def redis_py(client: redis.Redis) -> Callable[[], None]:
    """One pair of redis-py's, with a lock object of its own."""

    def pair() -> None:
        lock = client.lock(KEY, timeout=TIMEOUT)
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


def two_pings(wire: socket.socket) -> Callable[[], None]:
    """Two round trips and nothing else."""

    def pair() -> None:
        for _ in range(2):
            wire.sendall(b"PING\r\n")
            received = 0
            while received < PONG:
                received += len(wire.recv(64))

    return pair


def bare_round_trips(folder: Path) -> float:
    """Return the microseconds of two bare round trips: how fast this machine is now."""
    with (
        RedisServer(folder) as server,
        socket.create_connection((LOOPBACK, int(server.port or 0))) as wire,
    ):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = rate(two_pings(wire))
        return 1e6 / median([pings() for _ in range(SPEED_ROUNDS)])


def rate(pair: Callable[[], None]) -> Callable[[], float]:
    """Make of a pair what measures pairs per second."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(PAIRS):
            pair()
        return PAIRS / (time.perf_counter() - began)

    return measure


def commands_per_pair(client: redis.Redis, pair: Callable[[], None]) -> dict[str, float]:
    """Count the commands that a client sends; what a script calls is not sent by anyone."""
    sent: Counter[str] = Counter()
    pair()  # its connection is made before we count
    with client.monitor() as monitor:
        client.echo("begin")  # and so is this one
        for _ in range(COUNTED):
            pair()
        client.echo("end")
        while not monitor.next_command()["command"].startswith("ECHO"):
            pass
        while not (seen := monitor.next_command())["command"].startswith("ECHO"):
            if seen["client_type"] != "lua":
                sent[seen["command"].partition(" ")[0].lower()] += 1
    return {name: number / COUNTED for name, number in sent.items()}


def server_time(client: redis.Redis, pair: Callable[[], None]) -> float:
    """Return the microseconds that the server spends on each command of a pair."""
    client.config_resetstat()
    for _ in range(PAIRS * 4):
        pair()
    stats = client.info("commandstats")
    ran = [stats[f"cmdstat_{name}"] for name in ("evalsha", "set") if f"cmdstat_{name}" in stats]
    # What a script calls is counted by itself, too: a SET of redis-py's is not called by a script.
    return float(sum(one["usec"] for one in ran) / sum(one["calls"] for one in ran))


def in_words(commands: dict[str, float]) -> str:
    return " + ".join(f"{number:g} {name}" for name, number in sorted(commands.items()))
