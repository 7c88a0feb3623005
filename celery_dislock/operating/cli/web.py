"""``celery dislock web``: serve the page, on this machine unless told otherwise."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from celery_dislock.exceptions import DislockError, SettingsError
from celery_dislock.operating.web import Page
from celery_dislock.operating.web.figures import EVERY
from celery_dislock.operating.web.http import BODY_MOST, LOOPBACK
from celery_dislock.operating.web.login import set_password

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 8765
THREADS = 8  # that answer requests; one reads the list of all locks, for all browsers
HEADERS_MOST = 32 * 1024  # bytes of a request's headers
CONNECTIONS = 200  # at a time; one more takes the place of the oldest that asks for nothing
ACCEPTED = 300  # those that are just closed are among them for an instant
IDLE = 30  # seconds after which a connection that says nothing is closed
CANNOT_SERVE = 1  # exit code

logger = logging.getLogger("celery_dislock")

FORWARDED = {"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}


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
    "--login-file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="The users and their passwords; see --set-password.",
)
@click.option(
    "--set-password",
    "new_password",
    metavar="NAME",
    help="Ask for a password, write it to the login file for this user, and serve nothing.",
)
@click.option(
    "--allow-actions", is_flag=True, help="Those who are logged in may free, drop, pause and limit."
)
@click.option(
    "--read-without-login/--login-to-read",
    default=None,
    help="Whether all may read without a login, or nobody.  Neither: browsers on this machine may.",
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
    login_file: str | None,
    new_password: str | None,
    allow_host: tuple[str, ...],
    host: str,
    port: int,
    trusted_proxy: str | None,
    url_prefix: str,
    **options: Any,
) -> None:
    """Serve a page with the locks: who holds what, since when, and who waits."""
    try:
        if new_password is not None:
            _set_password(context, login_file, new_password)
            return
        _check(context, host, login_file, allow_host, options)
        page = Page(
            context.obj.app, login=login_file, allowed_hosts=(*LOOPBACK, *allow_host), **options
        )
    except SettingsError as exc:
        raise click.UsageError(str(exc), context) from exc
    _serve(page, host, port, trusted_proxy, url_prefix)


def _set_password(context: click.Context, login_file: str | None, name: str) -> None:
    if login_file is None:
        raise click.UsageError("--set-password needs --login-file, the file to write to", context)
    password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
    set_password(login_file, name, password)
    click.echo(f"{login_file}: {name} can log in with this password.")


def _check(
    context: click.Context,
    host: str,
    login_file: str | None,
    allow_host: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    if options["allow_actions"] and login_file is None:
        told = "--allow-actions needs --login-file: an action needs somebody who did it"
        raise click.UsageError(told, context)
    if host in (*LOOPBACK, "::1"):
        return
    if login_file is None and not options["read_without_login"]:
        told = (
            f"--host {host} is not this machine alone: give --login-file, "
            "or --read-without-login to show the locks to everybody who can reach it"
        )
        raise click.UsageError(told, context)
    if not allow_host:
        told = f"--host {host} needs --allow-host, the name in the browser's address bar"
        raise click.UsageError(told, context)


def _serve(page: Page, host: str, port: int, trusted_proxy: str | None, url_prefix: str) -> None:
    try:
        from waitress.server import create_server  # noqa: PLC0415 -- an extra
    except ImportError as exc:
        told = 'the page needs a server: pip install "celery-dislock[web]"'
        raise click.UsageError(told) from exc
    proxy: dict[str, Any] = {}
    if trusted_proxy is not None:
        proxy = {"trusted_proxy": trusted_proxy, "trusted_proxy_headers": FORWARDED}
    try:
        server = create_server(
            page,
            host=host.strip("[]"),
            port=port,
            threads=THREADS,
            ident=None,
            url_prefix=url_prefix,
            connection_limit=ACCEPTED,
            channel_timeout=IDLE,
            max_request_header_size=HEADERS_MOST,
            max_request_body_size=BODY_MOST,
            clear_untrusted_proxy_headers=trusted_proxy is not None,
            **proxy,
        )
    except (OSError, ValueError) as exc:
        click.echo(f"Error: cannot listen at {host}:{port}: {exc}", err=True)
        sys.exit(CANNOT_SERVE)
    _make_room(server)
    logging.getLogger("waitress").setLevel(logging.ERROR)
    address = f"[{host}]" if ":" in host.strip("[]") else host
    with _ending():
        click.echo(
            f"The page is at http://{address}:{server.effective_port}{url_prefix}/ (^C ends it)"
        )
        sys.stdout.flush()
        threading.Thread(target=_note, args=(page,), daemon=True).start()
        try:
            server.run()
        finally:
            server.close()


def _make_room(server: Any) -> None:
    """Let connections that send slowly, or nothing, keep out nobody: the oldest makes room."""
    from waitress.channel import HTTPChannel  # noqa: PLC0415 -- an extra

    class Channel(HTTPChannel):  # type: ignore[misc]
        def add_channel(self, map: Any = None) -> None:  # noqa: A002 -- waitress names it
            super().add_channel(map)
            there = [one for one in self.server.active_channels.values() if not one.will_close]
            idle = [
                one for one in there if not (one is self or one.requests or one.total_outbufs_len)
            ]
            if len(there) > CONNECTIONS and idle:
                min(idle, key=lambda one: one.creation_time).will_close = True

    listening = getattr(server, "_map", None) or server.map  # the latter with several addresses
    for one in listening.values():
        if hasattr(one, "channel_class"):
            one.channel_class = Channel


def _note(page: Page) -> NoReturn:
    """Let the page note what was counted, also while nobody looks at it."""
    while True:
        try:
            page.note()
        except DislockError as exc:
            logger.warning("The page cannot note what was counted: %s", exc)
        time.sleep(EVERY)


@contextmanager
def _ending() -> Iterator[None]:
    """End with SIGTERM as with ^C, without a traceback."""

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
