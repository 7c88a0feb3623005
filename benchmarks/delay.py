"""
Stand between clients and a server on loopback, and hold back every byte for a while.

    python -m benchmarks.delay PORT SECONDS

It prints the port that it listens on.  What it is given it passes on after half of the seconds,
either way: a round trip takes them all, and what the proxy itself costs.  That is why the page
shows a bare PING through it.  A kernel would do it better (``tc netem``), but for everybody on the
machine, and as root only.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE = 0.0001  # seconds: epoll itself waits for whole milliseconds
RECEIVE = 65536  # bytes
LOOPBACK = "127.0.0.1"


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Run the proxy in a process of its own; yields its URL, or *url* itself for 0 seconds."""
    if not seconds:
        yield url
        return
    port, _, database = url.rpartition(":")[2].partition("/")
    command = [sys.executable, "-m", "benchmarks.delay", port, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield f"redis://{LOOPBACK}:{process.stdout.readline().strip()}/{database}"
        finally:
            process.terminate()


def main(port: int, seconds: float) -> None:
    """Never return."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    held: deque[tuple[float, socket.socket, bytes]] = deque()  # the delay is one: first in is first
    while True:
        ready = selector.select(0 if held else None)
        for key, _ in ready:
            if key.fileobj is listener:
                client, server = listener.accept()[0], socket.create_connection((LOOPBACK, port))
                for end, other in ((client, server), (server, client)):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(end, selectors.EVENT_READ, other)
                continue
            data = b""
            with suppress(OSError):
                data = key.fileobj.recv(RECEIVE)  # type: ignore[union-attr]
            held.append((time.monotonic() + seconds / 2, key.data, data))
            if not data:
                selector.unregister(key.fileobj)
        while held and held[0][0] <= time.monotonic():
            _, end, data = held.popleft()
            with suppress(OSError):  # the other end has gone
                end.sendall(data) if data else end.shutdown(socket.SHUT_WR)
        if held and not ready:
            time.sleep(min(SLICE, max(0.0, held[0][0] - time.monotonic())))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
