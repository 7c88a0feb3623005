"""The lock servers of a run, of each kind, and what can go wrong with each."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from proof.nemesis import HARMLESS, Fault, of_clocks
from proof.proxy import Proxy, cut, lose_reply, swallow_reply
from tests.holding import wait_for
from tests.integration.servers import MASTER_NAME, RedisCluster, Watched, is_master
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from proof.clocks import Clocks
    from proof.proxy import Command

KEPT = ("--appendonly", "yes")  # what was answered survives a kill of the server
NODE_TIMEOUT = 1000  # milliseconds of silence until a replica of the cluster takes over
SETTLED_WITHIN = 60.0  # seconds until the Sentinels agree on a master after a fault
COMES_WITHIN = 0.3  # seconds in which commands come to a fault that waits for one
FULL = {"maxmemory": "1"}
ROOMY = {"maxmemory": "0", "maxmemory-policy": "noeviction"}
# Keys that are kept for copies of messages that may still come, or for the whole app.  A waiter
# that was killed stays in a line that had parked tasks.
STAYS = (
    ":done:",
    ":running",
    ":unique",
    ":line",
    ":newest",
    ":lasted",
    ":unsent:",
    ":beat",
    "dislock:lines:",
    "dislock:epoch:",
    "dislock:sweep:",
)


class LockServers(ExitStack):
    """
    One lock server for the locks, of one or several processes; a context manager.

    Args:
        folder: Where they keep their data.
        clocks: The wall clocks of those whose clocks are set.

    Attributes:
        url: As it is given to Dislock.
        options: Transport options.
        nodes: The processes that may have data.
        proxied: The addresses of the proxies before them, if there are any.
        has_lines: Whether it can have lines, and locks of several holders.
        has_clocks: Whether the clocks of its processes can be set.
    """

    def __init__(self, folder: Path, clocks: Clocks | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.clocks = clocks
        self.url: str | list[str] = ""
        self.options: dict[str, Any] = {}
        self.nodes: Sequence[RedisServer] = ()
        self.has_lines = True
        self.has_clocks = False
        self.proxied: list[str] = []
        self._proxies: list[Proxy] = []
        self._ports: dict[bytes, bytes] = {}

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it; *timeout* is that of the leases."""
        raise NotImplementedError

    def set_clocks(self, seconds: int) -> None:
        """Set all clocks that can be set."""
        if self.clocks:
            for node in self.nodes:
                self.clocks.set(node.folder.name, seconds)

    def settled(self) -> bool:
        """Return whether no failover is under way, of which this object has not said."""
        return True

    def _commands(self, chance: random.Random) -> list[Fault]:
        """Return the faults that one command makes."""

        def command(*words: str) -> Callable[[], None]:
            return lambda: tell(chance.choice(self.nodes), *words)

        return [
            Fault("cut all connections", command("CLIENT", "KILL", "TYPE", "normal")),
            Fault("forget the scripts", command("SCRIPT", "FLUSH"), HARMLESS),
            Fault("pause all clients", command("CLIENT", "PAUSE", "300")),
        ]

    def _behind_proxy(self, server: RedisServer) -> str:
        """Return the address of a proxy before a server."""
        assert server.port is not None
        proxy = self.enter_context(Proxy(server.port, self._ports))
        self._ports[b"%d" % server.port] = b"%d" % proxy.port
        self._proxies.append(proxy)
        self.proxied.append(proxy.url)
        return proxy.url

    def _in_use(self) -> Sequence[Proxy]:
        """Return the proxies that clients use now."""
        return self._proxies

    def _network(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong between the clients and a server behind a proxy."""

        def black_hole() -> None:
            proxy = chance.choice(self._in_use())
            proxy.black_hole()
            try:
                time.sleep(chance.choice((0.3, 2.0)) * timeout)
            finally:
                proxy.heal()

        def replies(happens: str, many: int = 1) -> Callable[[], None]:
            def some() -> None:
                proxy = chance.choice(self._in_use())
                for _ in range(many):
                    proxy.fault(_is_of_a_lock, happens, nth=chance.randint(1, 20))
                time.sleep(COMES_WITHIN)
                proxy.forget_faults()

            return some

        def slow() -> None:
            proxy = chance.choice(self._in_use())
            proxy.delay = chance.choice((0.01, 0.1)) * timeout
            try:
                time.sleep(timeout)
            finally:
                proxy.delay = 0.0

        return [
            Fault("lose the replies of three scripts", replies(lose_reply, 3)),
            Fault("lose a script", replies(cut)),
            Fault("never send the reply of a script", replies(swallow_reply)),
            Fault("reset all connections", lambda: chance.choice(self._in_use()).cut_all()),
            Fault("half-close all connections", lambda: chance.choice(self._in_use()).half_close()),
            Fault("delay every byte", slow),
            Fault("let no byte through", black_hole),
        ]

    def _kept(self, folder: Path) -> RedisServer:
        """Start a server that keeps its data, and has a clock of its own."""
        self.has_clocks = self.clocks is not None
        clock = self.clocks.of(folder.name) if self.clocks else {}
        environment = {**os.environ, **clock}
        return self.enter_context(RedisServer(folder, args=KEPT, environment=environment))

    def _jumps(self, chance: random.Random, timeout: float, **more: bool) -> list[Fault]:
        """Return jumps of the clock of a server."""
        clocks = self.clocks
        if clocks is None:
            return []
        whose = "the server" if len(self.nodes) == 1 else f"one of {len(self.nodes)} servers"
        return of_clocks(
            whose,
            lambda: partial(clocks.set, chance.choice(self.nodes).folder.name),
            chance,
            timeout,
            lambda seconds: {"sets_clock": seconds, **more},
        )

    def _paused(self, chance: random.Random, timeouts: float, number: int = 1) -> None:
        """Stop some of the processes for a while."""
        nodes = chance.sample(list(self.nodes), number)
        for node in nodes:
            node.pause()
        try:
            time.sleep(timeouts)
        finally:
            for node in nodes:
                node.resume()

    def _killed(self, node: RedisServer, seconds: float) -> None:
        node.kill()
        time.sleep(seconds)
        node.start()


class One(LockServers):
    """A single server; all but the faults go through a proxy."""

    def __enter__(self) -> Self:
        server = self._kept(self.folder)
        self.nodes, self.url = [server], self._behind_proxy(server)
        return self

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it."""
        (server,) = self.nodes

        def lost() -> None:
            server.kill()
            for kept in server.folder.glob("appendonly*"):  # as if it had kept none
                shutil.rmtree(kept) if kept.is_dir() else kept.unlink()  # Redis 6.2 has a file
            server.start()

        def full(policy: str) -> None:
            with server.client() as client, suppress(redis.RedisError):
                for name, value in {"maxmemory-policy": policy, **FULL}.items():
                    client.config_set(name, value)
                time.sleep(timeout * 0.8)
                for name, value in ROOMY.items():
                    client.config_set(name, value)

        return [
            *self._commands(chance),
            *self._network(chance, timeout),
            Fault(
                "stop the server",
                lambda: self._paused(chance, timeout * chance.choice((0.3, 2.0))),
            ),
            Fault("kill the server", lambda: self._killed(server, timeout)),
            Fault("kill the server, which loses its data", lost, {"loses_data": True}),
            *self._jumps(chance, timeout, ends_leases=True),
            Fault("no memory left", lambda: full("noeviction")),
            Fault("no memory left, evict", lambda: full("allkeys-random"), {"loses_data": True}),
            Fault("delete everything", lambda: tell(server, "FLUSHALL"), {"loses_data": True}),
        ]


class Lasting(One):
    """The same without the faults that lose data, which would excuse that a task is lost."""

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it."""
        found = super().faults(chance, timeout)
        return [fault for fault in found if not fault.more.get("loses_data")]


class Sentinels(LockServers):
    """A master and two replicas, watched by three Sentinels."""

    def __enter__(self) -> Self:
        self._watched = self.enter_context(Watched(self.folder))
        self.nodes = self._watched.servers
        for node in self.nodes:
            self._behind_proxy(node)
        asked = [self._behind_proxy(one) for one in self._watched.sentinels]
        self.url = ";".join(f"sentinel://{_host(url)}" for url in asked)
        self.options = {"master_name": MASTER_NAME}
        return self

    def _in_use(self) -> Sequence[Proxy]:
        """Return the proxies before the master and before the Sentinels."""
        return [
            proxy
            for proxy, one in zip(
                self._proxies, [*self.nodes, *self._watched.sentinels], strict=True
            )
            if one in self._watched.sentinels or is_master(one)
        ]

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it."""
        loses = {"loses_data": True}  # replicas are behind

        def killed() -> None:
            master = self._watched.master
            master.kill()
            self._watched.wait_for_master(master)
            time.sleep(timeout)
            master.start()
            self._settle()

        def planned() -> None:
            tell(self._watched.sentinels[0], "SENTINEL", "FAILOVER", MASTER_NAME)
            time.sleep(timeout)
            self._settle()

        def paused() -> None:
            master = self._watched.master
            master.pause()
            time.sleep(3.0 * timeout)
            master.resume()
            time.sleep(timeout)
            self._settle()

        return [
            *self._commands(chance),
            *self._network(chance, timeout),
            Fault("kill the master", killed, loses),
            Fault("ask for a failover", planned, loses),
            Fault("stop the master until it is replaced", paused, loses),
        ]

    def settled(self) -> bool:
        """Return whether the Sentinels agree; a late one may demote the master, and lose data."""
        masters = [one.port for one in self.nodes if is_master(one)]
        return len(masters) == 1 and set(self._watched.named()) == set(masters)

    def _settle(self) -> None:
        wait_for(self.settled, "Sentinels that agree", within=SETTLED_WITHIN)


class Cluster(LockServers):
    """Three masters, each with a replica."""

    def __enter__(self) -> Self:
        self._cluster = self.enter_context(RedisCluster(self.folder, node_timeout=NODE_TIMEOUT))
        self.nodes = self._cluster.servers
        first, second = [self._behind_proxy(node) for node in self.nodes][1:3]
        self.url = f"redis+cluster://{_host(first)},{_host(second)}"
        return self

    def _in_use(self) -> Sequence[Proxy]:
        """Return the proxies before the masters."""
        pairs = zip(self._proxies, self.nodes, strict=True)
        return [proxy for proxy, node in pairs if is_master(node)]

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it."""

        def masters() -> list[RedisServer]:
            return [one for one in self.nodes if is_master(one)]

        def killed() -> None:
            master = chance.choice(masters())
            master.kill()
            time.sleep(3.0 * NODE_TIMEOUT / 1000)
            master.start()
            time.sleep(timeout)

        def planned() -> None:
            tell(chance.choice([one for one in self.nodes if not is_master(one)]), *FAILOVER)
            time.sleep(timeout)

        def moved() -> None:
            source, target = chance.sample(masters(), 2)
            with source.client(decode_responses=True) as client:
                key = client.randomkey()
            if key:
                with self._cluster.moving(key, source, target):
                    time.sleep(timeout * chance.choice((0.1, 1.5)))

        return [
            *self._commands(chance),
            *self._network(chance, timeout),
            Fault("kill a master", killed, {"loses_data": True}),
            Fault("ask for a failover", planned, {"loses_data": True}),
            Fault("move a slot", moved),
        ]


FAILOVER = ("CLUSTER", "FAILOVER")


# A lease that one of several servers has not released stays there until it expires.
MISSES = {"misses_releases": True}


class Five(LockServers):
    """Five independent servers, of which a majority decides."""

    def __enter__(self) -> Self:
        self.nodes = [self._kept(self.folder / f"server-{n}") for n in range(5)]
        self.url, self.has_lines = [self._behind_proxy(node) for node in self.nodes], False
        return self

    def faults(self, chance: random.Random, timeout: float) -> list[Fault]:
        """Return what can go wrong with it."""

        def away(number: int) -> Callable[[], None]:
            return lambda: self._paused(chance, timeout * chance.choice((0.3, 2.0)), number)

        def killed() -> None:
            self._killed(chance.choice(self.nodes), timeout)

        return [
            *self._commands(chance),
            *self._network(chance, timeout),
            # It ends a lease that two of the others do not have.
            *self._jumps(chance, timeout, ends_leases=True),
            Fault("one of five away", away(1), MISSES),
            Fault("two of five away", away(2), MISSES),
            Fault("three of five away", away(3), MISSES),
            Fault("kill one of five", killed, MISSES),
        ]


KINDS: dict[str, type[LockServers]] = {
    "redis": One,
    "lasting": Lasting,
    "sentinel": Sentinels,
    "cluster": Cluster,
    "quorum": Five,
}


def tell(server: RedisServer, *words: str) -> None:
    """Send a command to one process, which may cut the connection by it, or refuse it."""
    with server.client() as client, suppress(redis.RedisError):
        client.execute_command(*words)


def ttls(servers: LockServers) -> Iterator[tuple[str, int]]:
    """Return each key that is left on the lock server, and the milliseconds until it expires."""
    for node in servers.nodes:
        if not is_master(node):
            continue
        with node.client(decode_responses=True) as client:
            for key in client.scan_iter(count=1000):
                yield key, client.pttl(key)


def _host(url: str) -> str:
    """Return the host and the port of a Redis URL."""
    return url.removeprefix("redis://").removesuffix("/0")


def _is_of_a_lock(command: Command) -> bool:
    return command[0] in {b"EVALSHA", b"EVAL", b"SET"}  # other libraries take locks with SET
