"""Find the lock server: the one in the settings, or one that Celery already uses; parse its URL.

URL and TLS options are read as Celery, kombu and redis-py write them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SINGLE = ("redis://", "rediss://", "redis+socket://", "unix://")
WITHOUT_TLS = ("redis+socket://", "unix://")
SENTINEL = ("sentinel://",)
CLUSTER = ("redis+cluster://", "rediss+cluster://")
MEMORY = "memory://"  # a server inside this process
SCHEMES = SINGLE + SENTINEL + CLUSTER

FEWEST = 3  # servers: the smallest number of which one may fail
ONLY_EXCLUSIVE = "several lock servers (dislock_url is a list) keep exclusive locks only"
NO_REPLICAS = "not with several lock servers: a majority of them takes the place of replicas"

URL_WANTED = (
    "give the lock server's URL: redis://host:6379/0, rediss://..., unix:///path, sentinel://... "
    "or redis+cluster://host:6379"
)

_BACKEND = "result_backend"
_CELERYS = (  # Celery's settings in order of preference: URL, TLS options, transport options
    ("broker_write_url", "broker_use_ssl", "broker_transport_options"),
    ("broker_url", "broker_use_ssl", "broker_transport_options"),
    (_BACKEND, "redis_backend_use_ssl", "result_backend_transport_options"),
)
# Transport options of Celery that are used for locks, too.  Timeouts are not: locks have their own.
_TAKEN_OVER = ("master_name", "sentinel_kwargs", "min_other_sentinels")
_CREDENTIALS = "credential_provider"

SENTINEL_PORT = 26379
REDIS_PORT = 6379


HIDDEN = "***"  # shown instead of a value that a message must not contain

# A URL that a message may show but for its password and query.  Any other text might have a
# misplaced password in it.
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-6]?\d{1,4})?"
_LOGIN = r"(?P<login>(?:(?P<user>[\w.-]*):)?[^@/?#;,]+@|[^@/?#;,]*@)?"
_HOSTS = re.compile(
    rf"(?P<scheme>[A-Za-z][A-Za-z0-9+]{{0,20}})://{_LOGIN}"
    rf"(?P<place>{_HOST}(?:[;,](?:(?P=scheme)://)?{_HOST})*(?:/\d{{0,5}}/?)?)(?:\?[^@#]*)?",
    re.ASCII,
)
_SOCKET = re.compile(
    rf"(?P<scheme>unix|redis\+socket)://{_LOGIN}(?P<place>/[^@:?#]*)(?:\?[^@:#]*)?", re.ASCII
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+]{0,20}://)")
# Text without a scheme, or with a part of one, that cannot be a password: a socket's path, or a
# host with a port or a domain.
_BARE = re.compile(
    r"(?:(?:rediss?|sentinel)(?:\+cluster)?:?/{0,2}(?=\w))?"
    r"(?:localhost|(?:[a-z0-9-]+\.)+[a-z]{2,}|(?:\d+\.){3}\d+|[\w.-]+(?=:\d))"
    r"(?::[0-6]?\d{1,4})?(?:/\d{0,5}/?)?|(?:unix:|redis\+socket:)?/[\w./-]*\.sock|",
    re.ASCII,
)


class Group(NamedTuple):
    """A parsed URL of several hosts."""

    name: str  # the URL without its password, for messages
    url: str  # URL of a single server, with the login, database and query of all hosts
    hosts: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        return f"Group({self.name!r})"


def redis_url(url: str) -> str:
    """Convert Celery's form of a URL to redis-py's: ``redis+socket://`` and ``CERT_REQUIRED``."""
    parts = urlsplit(url)
    if parts.scheme == "rediss":
        return re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda m: m[1].lower(), url)
    if parts.scheme != "redis+socket":
        return url
    query = parse_qs(parts.query)
    database = query.get("virtual_host", query.get("db", ["0"]))[0].strip("/")
    return f"unix://{parts.netloc}{parts.path}?db={database}"


def redis_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``ssl_cert_reqs`` to redis-py's text, from Celery's or from a constant of ssl."""
    options = dict(options)
    wanted = options.get("ssl_cert_reqs")
    wanted = getattr(wanted, "name", wanted)  # for asyncio, redis-py 5.0 takes no constant
    if isinstance(wanted, str):
        options["ssl_cert_reqs"] = wanted.removeprefix("CERT_").lower()
    return options


def group(url: str) -> Group:
    """
    Read a URL of several hosts: ``sentinel://a:1;sentinel://b:2/0``, ``redis+cluster://a:1,b:2``.

    User, password, database and query are each taken from the first host that has them.

    Raises:
        SettingsError: The URL cannot be parsed.
    """
    scheme = url.partition("://")[0]
    port = SENTINEL_PORT if scheme == "sentinel" else REDIS_PORT
    hosts, login, path, query = [], "", "", ""
    for given in re.split("[;,]", url):
        part = given if "://" in given else f"{scheme}://{given}"
        if not part.startswith(f"{scheme}://"):
            raise _refused(url, "the hosts have different schemes")
        try:
            parts = urlsplit(part)
            hosts.append((parts.hostname or "", parts.port or port))
        except ValueError:  # its message quotes the bad port, which may be a password
            raise _refused(url, "a port is not a number") from None
        if not parts.hostname:
            raise _refused(url, "a host is missing")
        login = login or parts.netloc.rpartition("@")[0]
        path = path or parts.path.rstrip("/")
        query = query or parts.query
    single = "rediss" if scheme == "rediss+cluster" else "redis"
    at = f"{login}@" if login else ""
    return Group(
        without_password(url),
        f"{single}://{at}localhost{path}{f'?{query}' if query else ''}",
        tuple(hosts),
    )


def check_several(urls: Sequence[str]) -> None:
    """
    Check the URLs of several independent servers.

    Raises:
        ValueError: They cannot be used together; the message does not quote them.
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
    """Return host and port of a single server, or path and 0 of a unix socket."""
    parts = urlsplit(redis_url(url))
    if parts.scheme == "unix":
        return parts.path, 0
    try:
        return parts.hostname or "localhost", parts.port or REDIS_PORT
    except ValueError:  # the bad port is reported when the connections are made
        return url, 0


def shown(value: object) -> Any:
    """Return a ``dislock_url``, one or several, without passwords, for a message."""
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return without_password(value) if isinstance(value, str) else harmless(value)


def harmless(value: object) -> Any:
    """Return an unknown value for a message: hidden, unless it is None, a boolean or a number."""
    return value if value is None or isinstance(value, (bool, int, float)) else HIDDEN


def without_password(url: str) -> str:
    """
    Return the URL without its password and query, for a log line; never raises.

    If the URL cannot be parsed, only its scheme is returned.  A text without a scheme is hidden
    entirely, unless it is a path or a host that cannot be a password.
    """
    if _BARE.fullmatch(url):
        return url
    found = _SOCKET.fullmatch(url) or _HOSTS.fullmatch(url)
    if not found:
        begins = _SCHEME.match(url)
        return f"{begins[1] if begins else ''}{HIDDEN}"
    user = "" if found["user"] is None else f"{found['user']}:"
    login = f"{user}{HIDDEN}@" if found["login"] else ""
    return f"{found['scheme']}://{login}{found['place']}"


def _refused(url: str, remedy: str) -> SettingsError:
    return SettingsError("app.conf", "dislock_url", without_password(url), remedy)


def lock_server(conf: Mapping[str, Any]) -> tuple[str | Sequence[str], Mapping[str, Any]]:
    """
    Find the lock server: ``dislock_url``, else the broker, else the result backend.

    Returns:
        The URL, or the URLs of several servers, and the connection options that belong to it.

    Raises:
        SettingsError: None of them is a Redis.
    """
    if shared := _shared_with_celery(conf):
        url, name, tls, transport = shared
        options = _options_of(url, conf.get(tls), conf.get(transport) or {})
        if name == _BACKEND and conf.get(f"redis_backend_{_CREDENTIALS}"):
            options.setdefault(_CREDENTIALS, conf[f"redis_backend_{_CREDENTIALS}"])
        return url, options
    if conf.get("dislock_url"):
        return conf["dislock_url"], {}
    remedy = f"neither the broker nor the result backend is a Redis; {URL_WANTED}"
    raise SettingsError("app.conf", "dislock_url", None, remedy)


def keyprefix(conf: Mapping[str, Any]) -> str:
    """
    Return the prefix of all of Celery's keys on the lock server; empty: none.

    The prefix separates apps, or environments of one app, that share a Redis.  It belongs to the
    server, as the TLS options do: a lock server that is not Celery's has none.
    """
    shared = _shared_with_celery(conf)
    return _keyprefix(shared[1], conf.get(shared[3])) if shared else ""


def any_keyprefix(conf: Mapping[str, Any]) -> str:
    """Return the first prefix that Celery's Redis servers have; empty: none."""
    found = (_keyprefix(name, conf.get(transport)) for _, name, _, transport in _of_celery(conf))
    return next(filter(None, found), "")


def _shared_with_celery(conf: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    """Return what :func:`_of_celery` tells of the lock server; None: it is not one of Celery's."""
    url = conf.get("dislock_url")
    return next((server for server in _of_celery(conf) if not url or url == server[0]), None)


def _of_celery(conf: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield URL and settings of each server of Celery's that could keep locks."""
    for name, tls, transport in _CELERYS:
        # Celery's configuration has properties for these, which read the environment first.
        url = _one_url(getattr(conf, name, None) or conf.get(name))
        if url.startswith(SCHEMES):
            yield url, name, tls, transport


def _keyprefix(name: str, transport: Mapping[str, Any] | None) -> str:
    given = str((transport or {}).get("global_keyprefix") or "")
    if name == _BACKEND and given and given[-1] not in ":_-.":
        given += "_"  # as Celery's result backends do
    # Braces mark the key of a lock in its name.
    return re.sub("[%{}]", lambda found: f"%{ord(found[0]):02X}", given)


def _one_url(given: Any) -> str:
    """Return the first of several URLs, or all of them joined with ";" if they are Sentinels."""
    urls = given if isinstance(given, (list, tuple)) else [given or ""]
    joined = ";".join(map(str, urls))
    return joined if joined.startswith(SENTINEL) else joined.split(";")[0]


def _options_of(url: str, tls: Any, transport: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: transport[name] for name in (_CREDENTIALS,) if name in transport}
    if url.startswith(SENTINEL):
        options.update((name, transport[name]) for name in _TAKEN_OVER if name in transport)
    if tls and not url.startswith(WITHOUT_TLS):
        if not url.startswith("rediss"):
            options["ssl"] = True  # kombu then uses TLS, even with redis://
        options.update(tls if isinstance(tls, dict) else {})
    return options
