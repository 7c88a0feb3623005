"""Refuse TLS options with which no connection can be made, before one is tried.

redis-py reads certificates at each connection, and some of its errors tell neither the option nor
the file.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dislock.config.urls import HIDDEN
from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CERT_REQS = "required", "optional", "none"
A_FILE = "give a file in PEM"
NO_KEY = "it has no private key: give ssl_keyfile, too"
NO_PAIR = "it is not the private key of ssl_certfile, or ssl_password does not open it"
VERSION, A_VERSION = "minimum_version", "give a member of ssl.TLSVersion"
OPTIONS = (
    *("ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile"),
    *("ssl_keyfile", "ssl_password", "ssl_min_version", "ssl_ciphers"),
)


def check_tls(name: str, arguments: Mapping[str, Any]) -> None:
    """
    Refuse TLS options of a connection that cannot be used; reads their files.

    Options that could be used once are not refused later by this process, nor by those that it
    forks: a file that is away for a moment makes the lock server away, and fails no task.

    Args:
        name: The URL without its password, for messages.
        arguments: Keyword arguments of redis-py's SSLConnection.

    Raises:
        SettingsError: Names the server, the option, its value, and what to give instead.
    """
    _check(f"lock server {name}", *map(arguments.get, OPTIONS))


@lru_cache(maxsize=100)
def _check(server: str, reqs: Any, authorities: Any, folder: Any, data: Any, *more: Any) -> None:
    certificate, key, password, least, ciphers = more
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def attempt(option: str, value: Any, remedy: str, use: Callable[[], Any]) -> None:
        if value is None:
            return
        try:
            use()
        except (OSError, TypeError, ValueError) as exc:
            missing = isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError)
            why = f"{exc.strerror}: " if missing else ""  # type: ignore[union-attr]
            raise SettingsError(server, option, value, f"{why}{remedy}") from exc

    if isinstance(reqs, str) and reqs not in CERT_REQS:
        raise SettingsError(server, "ssl_cert_reqs", reqs, f"give {', '.join(CERT_REQS)}")
    load = context.load_verify_locations
    attempt("ssl_ca_certs", authorities, A_FILE, lambda: load(authorities))
    attempt("ssl_ca_path", folder, "give a folder", lambda: list(Path(folder).iterdir()))
    shown = None if data is None else HIDDEN
    attempt("ssl_ca_data", shown, "give certificates in PEM or DER", lambda: load(cadata=data))
    if key is not None and certificate is None:
        raise SettingsError(server, "ssl_keyfile", key, "give its certificate, too: ssl_certfile")
    attempt("ssl_certfile", certificate, A_FILE, lambda: Path(certificate).read_bytes())
    attempt("ssl_keyfile", key, A_FILE, lambda: Path(key).read_bytes())
    has_key, pair, remedy = "ssl_certfile", certificate, NO_KEY
    if key is not None:
        has_key, pair, remedy = "ssl_keyfile", key, NO_PAIR
    chain = certificate, key, password or ""  # without one, OpenSSL asks the terminal
    attempt(has_key, pair, remedy, lambda: context.load_cert_chain(*chain))
    attempt("ssl_min_version", least, A_VERSION, lambda: setattr(context, VERSION, least))
    attempt("ssl_ciphers", ciphers, "OpenSSL knows none", lambda: context.set_ciphers(ciphers))
