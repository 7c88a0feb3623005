"""The libraries that docs/migrating.md is about, and what they have in Redis.

Other libraries' names for locks begin with a prefix of theirs, and ours with ``dislock``, so both
can be used in one app.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

LIMIT = 30.0  # seconds for what takes milliseconds
NEVER = -1  # what Redis answers for the time to live of a key without an expiry
HOUR = 3600  # seconds
DAY = 86400  # seconds
QUEUE = "celery"
NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there

LIBRARIES_WARN = [
    # celery-once has `\*` in a docstring: a warning when it is compiled, of a kind and with words
    # that depend on the version of Python.
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:SyntaxWarning"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]


@dataclass(frozen=True)
class Library:
    """
    A library to move from.

    Attributes:
        base: Its base class, as ``module:name``.
        prefix: First part of its locks' names.
        drops: Options with which a duplicate is dropped without an exception; no key is named.
        raises: Options with which a duplicate is an exception.
        error: That exception, and its attribute: the first task's id, or the seconds to go.
        by_corp: Options that make the key of the argument ``corp_id``.
        expiry: Seconds for which a lock lasts by default.
    """

    base: str
    prefix: str
    drops: dict[str, Any] = field(hash=False)
    raises: dict[str, Any] = field(hash=False)
    error: tuple[str, str, str]
    by_corp: dict[str, Any] = field(hash=False)
    expiry: int

    def __str__(self):
        return self.base.partition(":")[0].replace("_", "-")


@contextmanager
def worker(app, **options):
    """Run a worker in a thread; at the end it finishes what it has begun."""

    def leave_alone(**_):
        """Set up no logging: Celery would take the handlers of the tests away."""

    # Else it hears up to a second later that it may stop.
    app.conf.broker_transport_options = {"polling_interval": 0.05}
    setup_logging.connect(leave_alone)
    try:
        with start_worker(app, perform_ping_check=False, **({"pool": "solo"} | options)):
            yield
    finally:
        setup_logging.disconnect(leave_alone)


def corp_of(args, kwargs):
    """Return the key of a call, as celery-heimdall asks for it."""
    return f"export:{args[0] if args else kwargs['corp_id']}"


QUICK = {"unique": True, "unique_lock_blocking": False}  # else each duplicate waits for a second
CELERY_SINGLETON = Library(
    "celery_singleton:Singleton",
    "SINGLETONLOCK_",
    drops={},
    raises={"raise_on_duplicate": True},
    error=("celery_singleton", "DuplicateTaskError", "task_id"),
    by_corp={"unique_on": ["corp_id"]},
    expiry=NEVER,
)
CELERY_ONCE = Library(
    "celery_once:QueueOnce",
    "qo_",
    drops={"once": {"graceful": True}},
    raises={"once": {}},
    error=("celery_once", "AlreadyQueued", "countdown"),
    by_corp={"once": {"keys": ["corp_id"], "graceful": True}},
    expiry=HOUR,
)
CELERY_HEIMDALL = Library(
    "celery_heimdall:HeimdallTask",
    "h-lock:",
    drops={"heimdall": QUICK},
    raises={"heimdall": {**QUICK, "unique_raises": True}},
    error=("celery_heimdall", "AlreadyQueuedError", "likely_culprit"),
    by_corp={"heimdall": {**QUICK, "key": corp_of}},
    expiry=HOUR,
)
ALL = [CELERY_SINGLETON, CELERY_ONCE, CELERY_HEIMDALL]


def of(*libraries):
    """Run a test once with each of these libraries."""
    return pytest.mark.parametrize("library", libraries, ids=str)


of_all = of(*ALL)


def of_each(name, values):
    """Run a test with each library, and with what is expected of it."""
    expected = list(zip(ALL, values, strict=True))
    return pytest.mark.parametrize(("library", name), expected, ids=map(str, ALL))


def export(corp_id, kind="csv"):
    return corp_id


def messages(client):
    """Count the messages in the queue."""
    return client.llen(QUEUE)


def locks_of(client, library):
    """Return the names of a library's locks."""
    return client.keys(f"{library.prefix}*")


def reservations(client):
    """Return the names of our reservations, without those that keep numbers alone."""
    names = client.keys("dislock:*:unique")
    return [name for name in names if not (client.get(name) or "").startswith("1 - ")]


def expiry_of(client, names):
    """Return the seconds until the one key of these names ends; NEVER if it does not."""
    (name,) = names
    return client.ttl(name)


def about(seconds):
    """Equal a time to live of at most these seconds, of which some have passed."""
    return seconds if seconds == NEVER else pytest.approx(seconds - LIMIT / 2, abs=LIMIT / 2)


def database(url, number):
    """Return the URL of another database of a server."""
    return urlsplit(url)._replace(path=f"/{number}").geturl()
