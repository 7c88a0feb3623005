"""
A server to try things with: ``python -m celery_dislock.testing``.

Broker, result backend and lock server for the processes of this machine, where no Redis is at hand.
"""

from __future__ import annotations

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
        from celery_dislock.servers.memory import HOST, MemoryServer  # noqa: PLC0415 -- an extra
    except ImportError as exc:
        raise click.ClickException(str(exc)) from exc
    if port and (why := _not_free(HOST, port)):
        others = range(port + 1, PORT_MOST)
        free = next((other for other in others if not _not_free(HOST, other)), 0)
        raise click.ClickException(f"port {port}: {why}. Else give --port {free}")
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's threads are there
    server = MemoryServer(port)
    click.echo(
        f"Broker, result backend and lock server: {server.url}\n"
        "For trying and development, not for production: all is lost when it ends. Ctrl-C ends it."
    )
    signal.sigwait(ends)
    server.shutdown()
    server.server_close()
    click.echo("Ended.")


def _not_free(host: str, port: int) -> str:
    """Return why one cannot listen at a port, and be found there by its clients; "" if one can."""
    with suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return "it is taken, perhaps by a Redis that you can use"
    try:
        socket.create_server((host, port)).close()
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


if __name__ == "__main__":
    main(prog_name="python -m celery_dislock.testing")
