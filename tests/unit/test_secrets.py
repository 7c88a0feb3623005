"""Lock servers that cannot be used, with passwords in their URLs and options."""

import asyncio
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery

import celery_dislock
from celery_dislock import Dislock, SettingsError, SingletonTask
from celery_dislock.worker.steps import LockStep

PACKAGE = Path(celery_dislock.__file__).parent
GOOD = "redis://u:s3cret@a/0"
SECRET = {"password": "s3cret"}
MISSPELT = {**SECRET, "sokcet_timeout": 1}
MASTER = {"master_name": "m"}


def shows_it(value, depth=5):
    """Whether a local variable shows the password where errors are reported, such as by Sentry."""
    try:
        if isinstance(value, (str, bytes)):
            return "s3cret" in str(value)
        if isinstance(value, Mapping) and depth:
            return any(shows_it(one, depth - 1) for pair in value.items() for one in pair)
        if isinstance(value, Collection) and depth:
            return any(shows_it(one, depth - 1) for one in value)
        return "s3cret" in repr(value)
    except Exception:  # noqa: BLE001 -- a task or a lock that could not be made has no repr
        return False


def frames_with_it(error):
    """The frames of this package that show the password, of an error and all that led to it."""
    seen, found = [], []
    errors = [error]
    while errors:
        seen.append(one := errors.pop())
        linked = (one.__cause__, one.__context__)
        errors += [other for other in linked if other is not None and other not in seen]
        for frame, line in traceback.walk_tb(one.__traceback__):
            path = Path(frame.f_code.co_filename)
            names = [name for name, value in frame.f_locals.items() if shows_it(value)]
            if names and PACKAGE in path.parents:
                found.append(f"{path.name}:{line} {frame.f_code.co_name}: {names}")
    return found


def refused_without_it(error):
    """Check that neither the text of an error nor a frame shows the password."""
    texts = [*traceback.format_exception_only(error), repr(error.args), str(error.__cause__)]
    assert "s3cret" not in "".join(texts)
    assert frames_with_it(error) == []


def by_url(url, **settings):
    """Take a lock without an app."""
    Dislock.from_url(url, **settings).lock("k").try_acquire()


def by_coroutine(url, **settings):
    """The same in a coroutine."""

    async def take():
        await Dislock.from_url(url, **settings).async_lock("k").try_acquire()

    asyncio.run(take())


def app_of(url, **settings):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(dislock_url=url, **{f"dislock_{name}": it for name, it in settings.items()})
    return app


def by_app(url, **settings):
    """Take a lock of an app."""
    Dislock(app_of(url, **settings)).lock("k").try_acquire()


def by_task(app, **options):
    @app.task(base=SingletonTask, **{"lock_key": "k", **options}, shared=False)
    def export(): ...

    export.apply(throw=True)


def of_task(url, **settings):
    """Bind a task and run it."""
    by_task(app_of(url, **settings))


def of_worker(url, **settings):
    """Start a worker."""
    worker = SimpleNamespace(app=app_of(None, **settings), pool_cls=object)
    LockStep(worker, dislock=True, dislock_url=url)


def of_broker(url, **_settings):
    """Run a task of an app whose broker is the lock server."""
    by_task(Celery("shop", broker=url, set_as_current=False))


WAYS = [by_url, by_coroutine, by_app, of_task, of_worker, of_broker]
ODD = [
    "redis://u:s3cret#@a:1/0",
    "redis://u:s3cret@a:port",
    "redis://u:s3cret@a:99999",
    "redis://u:s3cret@[::1",
    "redis://u:s3cret@a/O",
    "redis://u:s3cret@a?sokcet_timeout=3",
    "redis://u:s3cret@a?db=x",
    "rediss://u:s3cret@a?ssl_ca_certs=gone.pem",
    "u:s3cret@a:6379",
    "redis:u:s3cret@a",
    "http://u:s3cret@a",
    "sentinel://u:s3cret@a:port",
    "sentinel://u:s3cret@a",
    "sentinel://u:s3cret@a;redis://b",
    "redis+cluster://u:s3cret@a,",
    "redis+cluster://u:s3cret@a/3",
    "redis+cluster://u:se/cret@a:s3cret",
]
SEVERAL = [
    ["redis://u:s3cret@a"],
    ["redis://u:s3cret@a"] * 3,
    ["redis://u:s3cret@a:port", "redis://b", "redis://c"],
    ["redis://u:s3cret@a/O", "redis://b", "redis://c"],
    ["sentinel://u:s3cret@a", "redis://b", "redis://c"],
    [7, "redis://u:s3cret@a", 8],
    b"redis://u:s3cret@a",
]


SETTINGS = [
    {"prefix": "{"},
    {"watchdog_timeout": -1},
    {"min_replicas": "many"},
    {"transport_options": "s3cret"},
    {"transport_options": MISSPELT},
]


@pytest.mark.parametrize(
    ("way", "url", "settings"),
    [
        *((way, url, {}) for url in ODD for way in WAYS),
        *((way, url, {}) for url in SEVERAL for way in WAYS if way is not of_broker),
        *((way, GOOD, settings) for settings in SETTINGS for way in WAYS if way is not of_broker),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_no_frame_has_the_password_if_a_setting_is_refused(way, url, settings):
    """What is reported of an error, as by Sentry, has the variables of all frames."""
    with pytest.raises((SettingsError, SystemExit)) as caught:
        way(url, **settings)
    refused_without_it(caught.value)


@pytest.mark.parametrize(
    "refused",
    [
        lambda app: by_task(app, lock_wait_timeout="soon"),
        lambda app: by_task(app, lock_watchdog_timout=3),
        lambda app: Dislock(app).lock("k", expire="soon"),
        lambda app: Dislock(app).lock("k", exprie=3),
        lambda _: Dislock(GOOD),
    ],
)
def test_no_frame_has_the_password_if_an_option_is_refused(refused):
    """Of a task, or of a lock in plain Python; or if a URL is given in place of an app."""
    with pytest.raises(SettingsError) as caught:
        refused(app_of(GOOD))
    refused_without_it(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("redis://u:s3cret@a/O", {}, "dislock_url.*the database is a number"),
        ("rediss://a/s3cret", {}, "dislock_url.*the database is a number"),
        ("sentinel://u:s3cret@a:port", MASTER, "dislock_url"),
        ("redis+cluster://u:s3cret@a/3", {}, "dislock_url"),
        ("sentinel://a", SECRET, "'master_name'"),
        ("sentinel://a", {"master_name": None}, "'master_name'"),
        ("sentinel://a", {"master_name": 7}, "'master_name'"),
        ("redis://a", MISSPELT, "dislock_transport_options"),
        ("redis://a", {"ssl_ca_certs": "ca.pem"}, "dislock_transport_options"),
        ("redis://a", {"credential_provider": "s3cret"}, "dislock_transport_options"),
        ("redis://a", {"credential_provider": SECRET}, "dislock_transport_options"),
        ("redis+cluster://a", MISSPELT, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sokcet_timeout": 1}, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sentinel_kwargs": MISSPELT}, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sentinel_kwargs": "s3cret"}, "dislock_transport_options"),
    ],
)
def test_a_url_or_an_option_that_cannot_be_used_is_refused(url, options, told):
    """The error names the setting, and not the password; nothing is connected to."""
    with pytest.raises(SettingsError, match=told) as caught:
        Dislock.from_url(url, transport_options=options).lock("k").try_acquire()
    refused_without_it(caught.value)
