"""
A server to try things with: ``python -m celery_dislock.testing``.

Broker, result backend and lock server for the processes of this machine, where no Redis is at hand.
"""

from __future__ import annotations

import errno
import signal
import socket
from contextlib import suppress

import click

PORT = 6379  # Redis's, so that examples need no change
PORT_MOST = 65535


@click.command()
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(0, PORT_MOST),
    help="The port; 0: a free one.",
)
def main(port: int) -> None:
    """Serve a broker, a result backend and locks from the memory of this process.

    It is for trying and for development. Use its URL as that of a Redis. Ctrl-C ends it.
    """
    try:
        from celery_dislock.servers.memory import MemoryServer  # noqa: PLC0415 -- an extra
    except ImportError as exc:
        raise click.ClickException(str(exc)) from exc
    if port and _answers(port):
        raise click.ClickException(_taken(port))
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's threads are there
    try:
        server = MemoryServer(port)
    except OSError as exc:
        told = _taken(port) if exc.errno == errno.EADDRINUSE else f"port {port}: {exc.strerror}"
        raise click.ClickException(told) from exc
    click.echo(
        f"Broker, result backend and lock server: {server.url}\n"
        "For trying and development, not for production: all is lost when it ends. Ctrl-C ends it."
    )
    signal.sigwait(ends)
    server.shutdown()
    server.server_close()
    click.echo("Ended.")


def _answers(port: int) -> bool:
    """Tell whether somebody listens where clients go that ask for localhost."""
    with suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


def _taken(port: int) -> str:
    free = next((other for other in range(port + 1, PORT_MOST) if not _answers(other)), 0)
    return f"port {port} is taken, perhaps by a Redis that you can use; else give --port {free}"


if __name__ == "__main__":
    main(prog_name="python -m celery_dislock.testing")
