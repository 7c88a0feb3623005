"""A TCP proxy between a client and a Redis server that loses what it is told to lose.

It reads the protocol: commands of the client one by one, and the server's replies, which come in
the same order.  A fault is told by a predicate on the command, and by what happens to it::

    proxy.fault(runs(RELEASE), lose_reply)  # the next release is done, and its answer is lost
    proxy.fault(runs(RENEW), cut, times=3)  # three renewals do not arrive
    proxy.fault(runs(RENEW), meanwhile)  # meanwhile() is called before the next renewal goes on

A Sentinel and a node of a cluster tell clients where others are.  Where those are behind proxies,
too, their ports become those of the proxies.

``black_hole`` freezes everything: connections stay open, new ones are taken, no byte arrives.
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from celery_dislock.scripts import Script

Command = list[bytes]

# What can happen to a command.
pass_on = "pass on"  # noqa: S105 -- no password; nothing happens to it
cut = "cut"  # it does not reach the server; the connection ends
lose_reply = "lose reply"  # the server does it; the connection ends instead of its reply
swallow_reply = "swallow reply"  # the server does it; the connection stays, and is silent
REFUSED = "-"  # how an error begins that the client is told; the command does not reach the server
INSTEAD = b"*1\r\n$4\r\nPING\r\n"  # is sent for a refused command, so that replies stay in order

TELLS = {b"CLUSTER", b"SENTINEL"}  # commands whose replies name servers
REDIRECTS = (b"-MOVED ", b"-ASK ")  # errors that do
PORT = re.compile(rb"\b\d{5}\b")  # of the same length, so that the protocol's lengths stay right
NO_PORTS: Mapping[bytes, bytes] = {}
RECEIVE = 65536  # bytes
KEPT = 100_000  # commands


def runs(*scripts: Script) -> Callable[[Command], bool]:
    """Make a predicate: the command runs one of these scripts, by its hash or by its text."""
    names = {script.sha.encode() for script in scripts}
    names |= {script.text.encode() for script in scripts}
    return lambda command: command[0] in {b"EVALSHA", b"EVAL"} and command[1] in names


class Proxy:
    """
    The proxy, as a context manager; it listens on a free loopback port.

    Args:
        port: The server's loopback port.
        ports: The port of the proxy before each server, by the server's port; it may grow.

    Attributes:
        commands: The last commands that came from clients, in their order, with what happened to
            each.
        delay: Seconds by which everything arrives later, either way.
    """

    def __init__(self, port: int, ports: Mapping[bytes, bytes] = NO_PORTS) -> None:
        self.commands: deque[tuple[Command, str]] = deque(maxlen=KEPT)
        self.delay = 0.0
        self._server = ("127.0.0.1", port)
        self._ports = ports
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self._faults: list[tuple[Callable[[Command], bool], list[Any]]] = []
        self._open = threading.Event()
        self._open.set()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def port(self) -> int:
        """The proxy's loopback port."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The proxy's address as a Redis URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing = True
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self.cut_all()
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()

    def fault(
        self,
        matches: Callable[[Command], bool],
        happens: str | Callable[[], object],
        *,
        nth: int = 1,
        times: int = 1,
    ) -> None:
        """Let it happen to the *nth* command from now on that matches, and *times* in a row."""
        each: list[str | Callable[[], object]] = [*[pass_on] * (nth - 1), *[happens] * times]
        with self._mutex:
            self._faults.append((matches, each))

    def forget_faults(self) -> None:
        """Let nothing happen to a command any more."""
        with self._mutex:
            self._faults.clear()

    def count(self, matches: Callable[[Command], bool], happened: str | None = None) -> int:
        """Count the commands that came and match; those only to which that happened, if given."""
        with self._mutex:
            return sum(
                matches(command) and happened in {None, what} for command, what in self.commands
            )

    def cut_all(self) -> None:
        """End every connection."""
        with self._mutex:
            sockets, self._sockets = self._sockets, set()
        for end in sockets:
            _close(end)

    def half_close(self) -> None:
        """Tell both ends of every connection that no more will come; they may still send."""
        with self._mutex:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_WR)

    def black_hole(self) -> None:
        """Let no byte through, either way, until :meth:`heal`."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything through again, and what was held back first."""
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._closing:
                client.close()
                return
            try:
                server = socket.create_connection(self._server, timeout=10)
            except OSError:
                _close(client)  # nobody listens there: the client sees its connection end
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._mutex:
                self._sockets |= {client, server}
            sent: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
            self._start(self._commands, client, server, sent)
            self._start(self._replies, client, server, sent)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _commands(
        self,
        client: socket.socket,
        server: socket.socket,
        sent: queue.SimpleQueue[tuple[str, bytes]],
    ) -> None:
        def forward(frame: bytes) -> bool:
            command = words(frame)
            what = self._what_happens(command)
            if callable(what):
                what()
                what = pass_on
            if what == cut:
                return False
            sent.put((what, command[0]))
            server.sendall(INSTEAD if what.startswith(REFUSED) else frame)
            return True

        self._pump(client, server, forward)

    def _replies(
        self,
        client: socket.socket,
        server: socket.socket,
        sent: queue.SimpleQueue[tuple[str, bytes]],
    ) -> None:
        silent = False

        def backward(frame: bytes) -> bool:
            nonlocal silent
            what, command = sent.get()
            if command in TELLS or frame.startswith(REDIRECTS):
                frame = PORT.sub(lambda found: self._ports.get(found[0], found[0]), frame)
            # What follows a reply that is held back waits behind it, or it would pass for it.
            silent = silent or what == swallow_reply
            if what.startswith(REFUSED):
                what, frame = pass_on, f"{what}\r\n".encode()
            if what == pass_on and not silent:
                client.sendall(frame)
            return what != lose_reply

        self._pump(server, client, backward)

    def _pump(
        self, source: socket.socket, target: socket.socket, handle: Callable[[bytes], bool]
    ) -> None:
        buffer = b""
        try:
            while received := source.recv(RECEIVE):
                buffer += received
                self._open.wait()
                time.sleep(self.delay)
                start = 0
                while (end := end_of_value(buffer, start)) is not None:
                    if not handle(buffer[start:end]):
                        return
                    start = end
                buffer = buffer[start:]
        except OSError:
            pass  # the other side has gone
        finally:
            _close(source)
            _close(target)
            with self._mutex:
                self._sockets -= {source, target}

    def _what_happens(self, command: Command) -> Any:
        with self._mutex:
            what = pass_on
            for matches, happens in self._faults:
                if happens and matches(command):
                    what = happens.pop(0)
                    break
            self.commands.append((command, pass_on if callable(what) else what))
            return what


def end_of_value(data: bytes, start: int) -> int | None:
    """Return the index after the protocol value that begins at *start*; None if it is not all."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return None
    kind, after = data[start : start + 1], line + 2
    if kind in b"$=!":
        length = int(data[start + 1 : line])
        after += length + 2 if length >= 0 else 0
        return after if len(data) >= after else None
    if kind in b"*%~>":
        values = max(int(data[start + 1 : line]), 0) * (2 if kind == b"%" else 1)
        for _ in range(values):
            end = end_of_value(data, after)
            if end is None:
                return None
            after = end
    return after


def words(frame: bytes) -> Command:
    """Return the words of a command."""
    found = []
    position = frame.index(b"\r\n") + 2
    while position < len(frame):
        line = frame.index(b"\r\n", position)
        length = int(frame[position + 1 : line])
        found.append(frame[line + 2 : line + 2 + length])
        position = line + 2 + length + 2
    return found


def _close(end: socket.socket) -> None:
    # shutdown() first: a close() alone leaves another thread in its recv().
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
