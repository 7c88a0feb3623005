"""Lock servers of every kind, made of processes that a test starts and ends."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import redis
from redis.crc import key_slot

from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from tests.holding import wait_for
from tests.pace import REPLY
from tests.redis_server import RedisServer, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from celery_dislock.servers.store import Store

LOCK = "dislock:{export:7}"
LONG = 60.0  # seconds: no lease of these tests runs out by itself
HOLDER = '{"task":"shop.export","id":"id-1","worker":"celery@w1","pid":7}'
BUS = 10_000  # distance of a cluster node's second port from its first
WITHIN = 10.0  # seconds
MASTER_NAME = "locks"
FAST_SYNC = ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]
FAST_SYNC += ["--repl-ping-replica-period", "1"]
DOWN_AFTER = round(REPLY * 1000)  # milliseconds of silence until a Sentinel calls the master down


class Certificates(NamedTuple):
    """A throw-away certificate authority, and what it signed."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority, and certificates of a server at 127.0.0.1 and of a client."""
    authority = _certificate(folder, "authority", signed_by=None)
    return Certificates(
        authority,
        _certificate(folder, "server", signed_by="authority"),
        folder / "server.key",
        _certificate(folder, "client", signed_by="authority"),
        folder / "client.key",
    )


def _certificate(folder: Path, name: str, *, signed_by: str | None) -> Path:
    program = shutil.which("openssl")
    assert program
    made, settings = folder / f"{name}.pem", folder / f"{name}.cnf"
    settings.write_text(
        "[req]\ndistinguished_name=who\nprompt=no\n"
        f"[who]\nCN=celery-dislock test {name}\n"
        "[more]\nsubjectKeyIdentifier=hash\n"  # Python 3.13 wants these, too
        + (
            "basicConstraints=critical,CA:FALSE\nauthorityKeyIdentifier=keyid\n"
            "subjectAltName=IP:127.0.0.1,DNS:localhost\n"
            if signed_by
            else "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
        )
    )
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / f"{name}.key")]
    ask = [program, "req", *key, "-config", str(settings), "-days", "2"]
    if signed_by is None:
        _silently([*ask, "-x509", "-extensions", "more", "-out", str(made)])
        return made
    request = folder / f"{name}.csr"
    _silently([*ask, "-out", str(request)])
    sign = [program, "x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"]
    sign += ["-CA", str(folder / f"{signed_by}.pem"), "-CAkey", str(folder / f"{signed_by}.key")]
    _silently([*sign, "-extfile", str(settings), "-extensions", "more", "-out", str(made)])
    return made


def _silently(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def take(store: Store, owner: str, ttl: float = LONG, lock: str = LOCK) -> int:
    """Acquire a lock that must be free, and return the token."""
    answer = store.acquire([lock], owner, ttl, HOLDER)
    assert isinstance(answer, Granted), answer
    return answer.tokens[0]


def round_trip(store: Store, lock: str = LOCK) -> None:
    """Take, refuse, name, extend, renew and release: all that a lock server is for."""
    token = take(store, "a/1", lock=lock)
    assert take(store, "a/1", lock=lock) == token  # asked again, it is confirmed
    refused = store.acquire([lock], "b/1", LONG, HOLDER)
    assert isinstance(refused, Conflict)
    assert refused.owner == "a/1"
    assert LONG - 5 < refused.remaining < LONG + 1
    [held] = store.holders(lock)
    assert (held.owner, held.token, held.mode) == ("a/1", token, "exclusive")
    assert store.renew([([lock], "a/1", LONG)]) == [True]
    assert store.renew([([lock], "b/1", LONG)]) == [False]
    leases = [([lock], "a/1", LONG), ([lock], "b/1", LONG)]
    assert store.renew(leases, within=WITHIN) == [True, False]
    assert store.release([lock], "b/1") is False
    assert store.release([lock], "a/1") is True
    assert store.release([lock], "a/1") is False
    assert store.holders(lock) == []
    assert take(store, "b/1", lock=lock) > token
    assert store.release([lock], "b/1") is True


@contextlib.contextmanager
def several(number: int, folder: Path) -> Iterator[list[RedisServer]]:
    """Start so many servers that know nothing of each other."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RedisServer(folder / str(nth))) for nth in range(number)]


def tls_args(certificates: Certificates, port: int) -> list[str]:
    """Return the options of a server that listens on a port for TLS, beside its other one."""
    return [
        *("--tls-port", str(port), "--tls-auth-clients", "yes"),
        *("--tls-ca-cert-file", str(certificates.authority)),
        *("--tls-cert-file", str(certificates.server)),
        *("--tls-key-file", str(certificates.server_key)),
    ]


class TlsServer(RedisServer):
    """A Redis with a second port, for TLS, where clients must show a certificate."""

    def __init__(
        self, folder: Path, certificates: Certificates, *, args: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, args=args)
        self.tls_port = 0  # until started
        self._certificates = certificates

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.tls_port = free_port(BUS)

    def _options(self) -> list[str]:
        return [*super()._options(), *tls_args(self._certificates, self.tls_port)]

    @property
    def tls_url(self) -> str:
        """The TLS port's URL."""
        return f"rediss://127.0.0.1:{self.tls_port}/0"


class SentinelServer(RedisServer):
    """A Sentinel; it writes down what it learns, so it is told by a file what to watch.

    Args:
        folder: Where it keeps its file.
        master_port: Of the master.
        others: How many Sentinels watch it, too.
        args: More options.
    """

    def __init__(
        self, folder: Path, master_port: int, *, others: int = 2, args: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, args=["--sentinel", *args])
        self._master_port = master_port
        self._majority = (others + 1) // 2 + 1

    def _launch(self, program: Path) -> None:
        settings = self.folder / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder.resolve()}\n"
            f"sentinel monitor {MASTER_NAME} 127.0.0.1 {self._master_port} {self._majority}\n"
            f"sentinel down-after-milliseconds {MASTER_NAME} {DOWN_AFTER}\n"
            f"sentinel failover-timeout {MASTER_NAME} 3000\n"
        )
        with self._log().open("wb") as log:
            self._process = subprocess.Popen(
                [str(program), str(settings), *self._args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Watched:
    """A master, two replicas, and three Sentinels that watch them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.servers: list[RedisServer] = []
        self.sentinels: list[RedisServer] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            master = stack.enter_context(RedisServer(self._folder / "master", args=FAST_SYNC))
            follow = [*FAST_SYNC, "--replicaof", "127.0.0.1", str(master.port)]
            self.servers = [master] + [
                stack.enter_context(RedisServer(self._folder / name, args=follow))
                for name in ("replica-1", "replica-2")
            ]
            self.sentinels = [
                stack.enter_context(SentinelServer(self._folder / name, master.port or 0))
                for name in ("sentinel-1", "sentinel-2", "sentinel-3")
            ]
            wait_for(self._all_know_each_other, "Sentinels that know each other")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The Sentinels, as kombu spells them."""
        return ";".join(f"sentinel://127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def master(self) -> RedisServer:
        """The server that says it is the master."""
        return next(server for server in self.servers if server.running and is_master(server))

    def named(self) -> list[int]:
        """Return the port that each of the Sentinels has for the master."""
        found = []
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                found.append(client.sentinel_get_master_addr_by_name(MASTER_NAME)[1])
        return found

    def wait_for_master(self, other_than: RedisServer) -> RedisServer:
        """Wait until a failover is over."""

        def next_master() -> RedisServer | None:
            for server in self.servers:
                if server is not other_than and server.running and is_master(server):
                    return server
            return None

        found: RedisServer = wait_for(next_master, "the next master", within=60.0)
        return found

    def _all_know_each_other(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state = client.sentinel_masters()[MASTER_NAME]
                if (state["num-slaves"], state["num-other-sentinels"]) != (2, 2):
                    return False
        return self.master is self.servers[0]


class Node(RedisServer):
    """A node of a cluster: the bus has a port, too."""

    def _choose_ports(self) -> None:
        self.port = free_port(BUS)


class TlsNode(TlsServer, Node):
    """A node of a cluster whose nodes, too, use TLS among them."""


class RedisCluster:
    """Three masters with a third of the slots each, and a replica of each; all of TLS, or none."""

    def __init__(
        self, folder: Path, *, node_timeout: int, certificates: Certificates | None = None
    ) -> None:
        self._folder = folder
        self._certificates = certificates
        self._node_timeout = node_timeout  # milliseconds of silence until a replica takes over
        self._stack = contextlib.ExitStack()
        self.servers: list[RedisServer] = []  # masters first, their replicas in the same order

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.servers = [stack.enter_context(self._node(number)) for number in range(6)]
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def masters(self) -> list[RedisServer]:
        """Those that were made masters."""
        return self.servers[:3]

    @property
    def url(self) -> str:
        """Two of the nodes; the rest is to be found."""
        scheme = "rediss+cluster" if self._certificates else "redis+cluster"
        return f"{scheme}://" + ",".join(
            f"127.0.0.1:{self._port(server)}" for server in self.servers[1:3]
        )

    def _port(self, server: RedisServer) -> int:
        return server.tls_port if isinstance(server, TlsServer) else server.port or 0

    def nodes_of(self, key: str) -> tuple[RedisServer, RedisServer]:
        """Return the master that has the key's slot, and one that has not."""
        slot, ports = key_slot(key.encode()), {}
        with self.masters[0].client() as client:
            for start, end, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
                ports |= dict.fromkeys(range(start, end + 1), port)
        source, target = sorted(self.masters, key=lambda one: one.port != ports[slot])[:2]
        return source, target

    @contextlib.contextmanager
    def moving(
        self,
        key: str,
        source: RedisServer | None = None,
        target: RedisServer | None = None,
        *,
        first: Sequence[str] = (),
    ) -> Iterator[Callable[[], None]]:
        """
        Move the key's slot to another master, as ``redis-cli --cluster reshard`` does.

        Args:
            key: One in the slot.
            source: Who has it; None: found out.
            target: Who is to have it; None: another master.
            first: The keys that have moved already inside, while the slot has not; none: *key*.

        Yields:
            What moves the rest, ten keys at a time; the end does it, too.
        """
        slot = key_slot(key.encode())
        if source is None or target is None:
            source, target = self.nodes_of(key)
        with source.client() as old, target.client() as new:
            old_id, new_id = (_node_id(client) for client in (old, new))
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)

            def move(*keys: str | bytes) -> None:
                to = ("127.0.0.1", target.port, "", 0, 10_000, "KEYS")
                old.execute_command("MIGRATE", *to, *keys)

            def finish() -> None:
                while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
                    move(*keys)
                for client in (new, old):
                    client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
                # Else the next move of the slot may have the epoch of this one, and lose to it.
                wait_for(lambda: _epoch(old, "current") >= _epoch(new, "my"), "news of the move")

            move(*(first or [key]))
            yield finish
            finish()

    def _node(self, number: int) -> RedisServer:
        args = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(self._node_timeout)]
        args = [*FAST_SYNC, *args]
        folder = self._folder / f"node-{number}"
        if self._certificates is None:
            return Node(folder, args=args)
        args += ["--tls-cluster", "yes", "--tls-replication", "yes"]
        return TlsNode(folder, self._certificates, args=args)

    def _join(self) -> None:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(server.client()) for server in self.servers]
            ids = [_node_id(client) for client in clients]
            for number, client in enumerate(clients):
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < 3:
                    start, end = (16384 * n // 3 for n in (number, number + 1))
                    client.execute_command("CLUSTER", "ADDSLOTS", *range(start, end))
            for server in self.servers[1:]:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", self._port(server))
            wait_for(lambda: all(_known(client) == 6 for client in clients), "nodes that met")
            for client, master in zip(clients[3:], ids[:3], strict=True):
                client.execute_command("CLUSTER", "REPLICATE", master)
            wait_for(lambda: all(_settled(client) for client in clients), "a cluster that is up")


def _node_id(client: redis.Redis) -> str:
    return _text(client.execute_command("CLUSTER", "MYID"))


def _epoch(client: redis.Redis, which: str) -> int:
    return int(client.execute_command("CLUSTER INFO")[f"cluster_{which}_epoch"])


def _known(client: redis.Redis) -> int:
    return int(client.execute_command("CLUSTER INFO")["cluster_known_nodes"])


def _settled(client: redis.Redis) -> bool:
    # Whether a replica is there is asked of its master: the nodes tell each other at their leisure.
    state = client.info("replication")
    return (
        client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
        and len(client.execute_command("CLUSTER SLOTS")) == 3
        and (state["role"] == "slave" or state["connected_slaves"] == 1)
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_master(server: RedisServer) -> bool:
    """Ask the server whether it is one; Sentinels cut the connections to one they demote."""
    with server.client() as client, contextlib.suppress(redis.ConnectionError):
        return bool(client.info("replication")["role"] == "master")
    return False


def wait_for_replicas(master: RedisServer, number: int) -> None:
    """Wait until so many replicas have all that the master has."""

    def caught_up() -> bool:
        state = client.info("replication")
        return state["connected_slaves"] >= number and all(
            state[f"slave{n}"]["offset"] == state["master_repl_offset"] for n in range(number)
        )

    with master.client() as client:
        wait_for(caught_up, "replicas that caught up")
