"""How the URL and the TLS options of a lock server are spelt, by Celery, kombu and redis-py."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SINGLE = ("redis://", "rediss://", "redis+socket://", "unix://")
WITHOUT_TLS = ("redis+socket://", "unix://")
SENTINEL = ("sentinel://",)
CLUSTER = ("redis+cluster://", "rediss+cluster://")
SCHEMES = SINGLE + SENTINEL + CLUSTER

FEWEST = 3  # servers of which one may fail
ONLY_EXCLUSIVE = "several lock servers (dislock_url is a list) keep exclusive locks only"
NO_REPLICAS = "not with several lock servers: a majority of them takes the place of replicas"

URL_WANTED = (
    "give the lock server's URL: redis://host:6379/0, rediss://..., unix:///path, sentinel://... "
    "or redis+cluster://..."
)

HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_USER = re.compile(r"[\w.%+-]*")
_HOST = r"([a-z+]+://)?(\[[0-9a-fA-F:.%]*\]|[^]:/[;,]*)(:\d*)?(/[^;,]*)?"
_HOSTS = re.compile(f"{_HOST}([;,]{_HOST})*")

SENTINEL_PORT = 26379
REDIS_PORT = 6379


class Group(NamedTuple):
    """What a URL says that names several hosts."""

    name: str  # the URL as a message may show it
    url: str  # one of a single server, with all that the hosts have in common
    hosts: tuple[tuple[str, int], ...]


def redis_url(url: str) -> str:
    """Rewrite Celery's spellings as redis-py's: ``redis+socket://``, and ``CERT_REQUIRED``."""
    parts = urlsplit(url)
    if parts.scheme == "rediss":
        return re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda m: m[1].lower(), url)
    if parts.scheme != "redis+socket":
        return url
    query = parse_qs(parts.query)
    database = query.get("virtual_host", query.get("db", ["0"]))[0].strip("/")
    return f"unix://{parts.netloc}{parts.path}?db={database}"


def redis_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite Celery's spelling of ``ssl_cert_reqs`` as redis-py's; its constants are known."""
    options = dict(options)
    wanted = options.get("ssl_cert_reqs")
    if isinstance(wanted, str):
        options["ssl_cert_reqs"] = wanted.removeprefix("CERT_").lower()
    return options


def group(url: str) -> Group:
    """
    Read a URL of several hosts: ``sentinel://a:1;sentinel://b:2/0``, ``redis+cluster://a:1,b:2``.

    User, password, database and query are those of the first host that has them.

    Raises:
        ValueError: It cannot be read; the message quotes nothing of it.
    """
    scheme = url.partition("://")[0]
    port = SENTINEL_PORT if scheme == "sentinel" else REDIS_PORT
    hosts, login, path, query = [], "", "", ""
    for given in re.split("[;,]", url):
        part = given if "://" in given else f"{scheme}://{given}"
        if not part.startswith(f"{scheme}://"):
            raise ValueError("the hosts have different schemes")
        try:
            parts = urlsplit(part)
            hosts.append((parts.hostname or "", parts.port or port))
        except ValueError:  # it quotes what is no port, and may be a password
            raise ValueError("a port is no number") from None
        if not parts.hostname:
            raise ValueError("a host is missing")
        login = login or parts.netloc.rpartition("@")[0]
        path = path or parts.path.rstrip("/")
        query = query or parts.query
    user = f"{_shown_user(login)}:{HIDDEN}@" if login else ""
    single = "rediss" if scheme == "rediss+cluster" else "redis"
    at = f"{login}@" if login else ""
    return Group(
        f"{scheme}://{user}{','.join(f'{host}:{number}' for host, number in hosts)}{path}",
        f"{single}://{at}localhost{path}{f'?{query}' if query else ''}",
        tuple(hosts),
    )


def check_several(urls: Sequence[str]) -> None:
    """
    Check the URLs of several independent servers.

    Raises:
        ValueError: They cannot be used together; the message quotes nothing of them.
    """
    if not all(url.startswith(SINGLE) for url in urls):
        raise ValueError(
            "each of several lock servers is a single one: redis://, rediss:// or unix://; the URL "
            "of Sentinels or of a cluster stands alone"
        )
    if len(urls) < FEWEST:
        raise ValueError(f"give {FEWEST} or more, or one alone: a majority of two is both of them")
    if len({address(url) for url in urls}) < len(urls):
        raise ValueError("a server is named twice: they have to be different ones, not databases")


def address(url: str) -> tuple[str, int]:
    """Return host and port of a single server; of a unix socket its path, and 0."""
    parts = urlsplit(redis_url(url))
    if parts.scheme == "unix":
        return parts.path, 0
    try:
        return parts.hostname or "localhost", parts.port or REDIS_PORT
    except ValueError:  # what is no port is told where the connections are made
        return url, 0


def shown(value: object) -> Any:
    """Return a ``dislock_url``, one or several, as a message may show it."""
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return without_password(value) if isinstance(value, str) else value


def without_password(url: str) -> str:
    """
    Return the URL as a log line may show it, whatever is wrong with it.

    What could be a part of a password is left out, too.
    """
    scheme, found, rest = url.partition("://")
    if not found or not _SCHEME.fullmatch(scheme):
        return HIDDEN
    main, *after = re.split("[?#]", rest, maxsplit=1)
    if "@" in "".join(after):  # the password may have begun before the "?"
        return f"{scheme}://{HIDDEN}"
    login, at, hosts = main.rpartition("@")
    if not _HOSTS.fullmatch(hosts):
        return f"{scheme}://{HIDDEN}"
    if not at:
        return f"{scheme}://{hosts}"
    return f"{scheme}://{_shown_user(login)}:{HIDDEN}@{hosts}"


def _shown_user(login: str) -> str:
    """Return the user of a login; empty for what may be a password that lacks its colon."""
    user, colon, _ = login.partition(":")
    return user if colon and _USER.fullmatch(user) else ""
