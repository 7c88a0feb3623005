"""``celery dislock web``: serve the page, on this machine unless told otherwise."""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from celery_dislock.exceptions import SettingsError
from celery_dislock.operating.cli.session import user
from celery_dislock.words import plain

PORT = 8765

CONNECTIONS_MOST = 250
LIMITS = {
    "threads": 8,  # that answer requests; one reads the list of all locks, for all browsers
    "connection_limit": 300,  # from which on no more are taken, see Connections
    "channel_timeout": 30,  # seconds after which a connection that says nothing is closed
    "max_request_header_size": 32 * 1024,  # bytes
    "ident": None,  # no Server header
}
BELIEVED = {"trusted_proxy_headers": {"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}}


class Connections(dict[int, Any]):
    """
    The sockets of a server by their numbers.

    If there are many, the one that has said nothing for longest makes room for the next: somebody
    who opens hundreds, and sends nothing, closes the page to nobody else.
    """

    def __setitem__(self, number: int, channel: Any) -> None:
        super().__setitem__(number, channel)
        if len(self) > CONNECTIONS_MOST:
            others = (other for other in self.values() if other is not channel)
            idle = [other for other in others if _is_idle(other)]
            if idle:
                min(idle, key=lambda other: other.last_activity).will_close = True


def _is_idle(channel: Any) -> bool:
    """Tell whether one of waitress's sockets is a connection that asks for nothing now."""
    return not getattr(channel, "requests", True) and not channel.will_close


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The port; 0: a free one.",
)
@click.option(
    "--allow-actions",
    is_flag=True,
    help="Those who have the token may free, drop, pause and limit.",
)
@click.option("--show-arguments", is_flag=True, help="Show the arguments of parked tasks.")
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A host name by which browsers reach the page, beside those of the loopback.",
)
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    help="The address of a proxy whose X-Forwarded-For, -Host and -Proto are believed.",
)
@click.option(
    "--url-prefix", default="", metavar="PATH", help="The path at which a proxy shows the page."
)
@click.pass_context
def web(
    context: click.Context,
    /,
    *,
    host: str,
    port: int,
    allow_actions: bool,
    allow_host: tuple[str, ...],
    trusted_proxy: str | None,
    **options: Any,
) -> None:
    """Serve a page with the locks in a browser.

    It shows who holds what, since when, and who waits.

    Browsers on this machine may look at it. All who want to change something need the token in the
    address that is printed. Behind a proxy and on another address, everybody needs it.
    """
    try:
        from waitress.server import create_server  # noqa: PLC0415 -- an extra

        from celery_dislock.operating.web import page, token  # noqa: PLC0415 -- as above
    except ImportError as exc:
        raise click.UsageError('the page needs: pip install "celery-dislock[web]"') from exc
    is_here = host in (*page.LOOPBACK, "::1")
    if not is_here and not allow_host:
        remedy = f"--host {host} needs --allow-host, the name in the browser's address bar"
        raise click.UsageError(remedy, context)
    prefix = f"/{options.pop('url_prefix').strip('/')}".rstrip("/")
    is_free = is_here and not allow_host and trusted_proxy is None
    asker = token.Token(user(), is_free=is_free)
    try:
        served = page.Page(
            context.obj.app,
            user=asker.user,
            allow_actions=asker.is_there if allow_actions else False,
            allowed_hosts=(*page.LOOPBACK, *allow_host),
            **options,
        )
    except SettingsError as exc:
        raise click.UsageError(f"--allow-host {plain(exc.value)}: {exc.remedy}", context) from exc
    proxied = {"trusted_proxy": trusted_proxy, **BELIEVED} if trusted_proxy else {}
    try:
        server = create_server(
            asker.taken_from_address(served),
            map=Connections(),
            host=host.strip("[]"),
            port=port,
            url_prefix=prefix,
            clear_untrusted_proxy_headers=trusted_proxy is not None,
            max_request_body_size=page.BODY_MOST,
            **proxied,
            **LIMITS,
        )
    except (OSError, ValueError) as exc:
        raise click.ClickException(f"cannot listen at {host}:{port}: {exc}") from exc
    address = allow_host[0] if not is_here else f"[{host}]" if host == "::1" else host
    query = f"?token={asker.value}" if allow_actions or not is_free else ""
    _run(server, f"http://{address}:{port or _port_of(server)}{prefix}/{query}")


def _port_of(server: Any) -> int:
    """Return the free port that was taken; "localhost" may have one for each of its addresses."""
    listening = getattr(server, "effective_listen", None)
    port: int = listening[0][1] if listening else server.effective_port
    return port


def _run(server: Any, address: str) -> None:
    """Serve until ^C or SIGTERM, and end without a traceback."""
    logging.getLogger("waitress").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        click.echo(f"The page is at {address} (^C ends it)")
        sys.stdout.flush()
        server.run()
    server.close()
