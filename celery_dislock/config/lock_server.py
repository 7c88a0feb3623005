"""Find the lock server: the one in the settings, or one that Celery already uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.config.urls import SCHEMES, SENTINEL, URL_WANTED, WITHOUT_TLS, shown
from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CELERYS = (  # Celery's settings in order of preference: URL, TLS options, transport options
    ("broker_write_url", "broker_use_ssl", "broker_transport_options"),
    ("broker_url", "broker_use_ssl", "broker_transport_options"),
    ("result_backend", "redis_backend_use_ssl", "result_backend_transport_options"),
)
# Transport options of Celery that are used for locks, too.  Timeouts are not: locks have their own.
_TAKEN_OVER = ("master_name", "sentinel_kwargs", "min_other_sentinels")
_CREDENTIALS = "credential_provider"


def lock_server(conf: Mapping[str, Any]) -> tuple[str | Sequence[str], Mapping[str, Any]]:
    """
    Find the lock server: ``dislock_url``, else the broker, else the result backend.

    Returns:
        The URL, or the URLs of several servers, and the connection options that belong to it.

    Raises:
        SettingsError: None of them is a Redis, or ``dislock_url`` is no usable URL.
    """
    url = conf.get("dislock_url")
    if isinstance(url, (list, tuple)):
        return url, {}
    if url and not url.startswith(SCHEMES):
        raise SettingsError("app.conf", "dislock_url", shown(url), URL_WANTED)
    for name, tls, transport in _CELERYS:
        # Celery's configuration has properties for these, which read the environment first.
        candidate = _one_url(getattr(conf, name, None) or conf.get(name))
        if candidate.startswith(SCHEMES) and (not url or url == candidate):
            options = _options_of(candidate, conf.get(tls), conf.get(transport) or {})
            if name == "result_backend" and conf.get(f"redis_backend_{_CREDENTIALS}"):
                options.setdefault(_CREDENTIALS, conf[f"redis_backend_{_CREDENTIALS}"])
            return candidate, options
    if url:
        return url, {}
    remedy = f"neither the broker nor the result backend is a Redis; {URL_WANTED}"
    raise SettingsError("app.conf", "dislock_url", None, remedy)


def _one_url(given: Any) -> str:
    """Return the first of several URLs, or all of them joined with ";" if they are Sentinels."""
    urls = given if isinstance(given, (list, tuple)) else [given or ""]
    joined = ";".join(urls)
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
