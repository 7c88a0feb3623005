"""
What docs/migrating.md says, row by row: the same calls with the other library, and with ours.

A library that is not installed skips its tests.  Other libraries' names for locks begin with a
prefix of theirs, and ours with ``dislock``, so both can be used in one app.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery, chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import Ignore, Reject
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.lock import Lock as RedisLock

from celery_dislock import Dislock, SettingsError, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError, LockHeldError
from celery_dislock.servers.reservations import Reservations
from celery_dislock.tasks.sending import PUBLISH_FOR
from tests.docs.page import DOCS
from tests.docs.test_compared import LIMIT, wait_for, worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Task

PAGE = DOCS / "migrating.md"
NEVER = -1  # what Redis answers for the time to live of a key without an expiry
HOUR = 3600  # seconds
DAY = 86400  # seconds
QUEUE = "celery"
NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there

pytestmark = [
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

    def __str__(self) -> str:
        return self.base.partition(":")[0].replace("_", "-")


def corp_of(args: Any, kwargs: Any) -> str:
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


def of(*libraries: Library) -> pytest.MarkDecorator:
    """Run a test once with each of these libraries."""
    return pytest.mark.parametrize("library", libraries, ids=str)


of_all = of(*ALL)


def of_each(name: str, values: list[Any]) -> pytest.MarkDecorator:
    """Run a test with each library, and with what is expected of it."""
    expected = list(zip(ALL, values, strict=True))
    return pytest.mark.parametrize(("library", name), expected, ids=map(str, ALL))


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    """An app for all libraries: broker and locks on one server, results in memory."""
    with Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False) as app:
        settings = {"url": redis_url, "default_timeout": HOUR}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        Dislock(app)
        yield app


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make the libraries forget the clients that they keep for ever."""
    for module, name in (
        ("celery_once.backends.redis", "redis"),
        ("celery_singleton.backends", "_backend"),
    ):
        if find_spec(module.partition(".")[0]):
            monkeypatch.setattr(f"{module}.{name}", None)
    return monkeypatch


def export(corp_id: int, kind: str = "csv") -> int:
    return corp_id


@pytest.fixture
def theirs(app: Celery, fresh: pytest.MonkeyPatch) -> Callable[..., Task]:
    """Declare a task of another library; the test is skipped without it."""

    def declare(library: Library, options: dict[str, Any], body: Any = export, **more: Any) -> Task:
        module, name = library.base.split(":")
        base = getattr(pytest.importorskip(module), name)
        return app.task(base=base, **{"name": "theirs", "shared": False, **options, **more})(body)

    return declare


@pytest.fixture
def ours(app: Celery) -> Callable[..., Task]:
    """Declare a task of ours that is unique when sent."""

    def declare(body: Any = export, **options: Any) -> Task:
        options = {"name": "ours", "lock_unique_until": "end", **options}
        return app.task(base=SingletonTask, shared=False, **options)(body)

    return declare


def messages(client: redis.Redis) -> int:
    """Count the messages in the queue."""
    return client.llen(QUEUE)


def locks_of(client: redis.Redis, library: Library) -> list[str]:
    """Return the names of a library's locks."""
    return client.keys(f"{library.prefix}*")


def reservations(client: redis.Redis) -> list[str]:
    """Return the names of our reservations."""
    return client.keys("dislock:*:unique")


def expiry_of(client: redis.Redis, names: list[str]) -> int:
    """Return the seconds until the one key of these names ends; NEVER if it does not."""
    (name,) = names
    return client.ttl(name)


def about(seconds: int) -> Any:
    """Equal a time to live of at most these seconds, of which some have passed."""
    return seconds if seconds == NEVER else pytest.approx(seconds - LIMIT / 2, abs=LIMIT / 2)


def database(url: str, number: int) -> str:
    """Return the URL of another database of a server."""
    return urlsplit(url)._replace(path=f"/{number}").geturl()


def refused(app: Celery, **options: Any) -> str:
    """Declare a task of ours with an option of another library, and return what is said."""
    with pytest.raises(SettingsError) as caught:
        app.task(base=SingletonTask, name="refused", shared=False, **options)(export)
        app.finalize()
    assert "refused" not in app.tasks
    return str(caught.value)


def rows() -> list[str]:
    """Return the rows of the page's tables whose last column is a test, without the headings."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text("utf-8"), re.MULTILINE)
    lines = [table.splitlines() for table in tables]
    return [row for heading, _, *rest in lines if heading.endswith("| test |") for row in rest]


def test_every_row_names_a_test():
    """The last column of each table is a test that exists, and each test here is on the page."""
    named = {row: re.search(r"\| `(\w+)` \|$", row) for row in rows()}
    assert [row for row, name in named.items() if name is None] == []
    tests = "".join(
        file.read_text("utf-8") for file in Path(__file__).parents[1].rglob("test_*.py")
    )
    on_page = {name[1] for name in named.values() if name}
    assert [name for name in on_page if f"def {name}(" not in tests] == []
    own = re.findall(r"^    def (test_\w+)\(", Path(__file__).read_text("utf-8"), re.MULTILINE)
    assert set(own) - on_page == set()


class TestOptions:
    """The tables of options: what they did there, and what does it here."""

    @of_all
    def test_a_base_class_and_one_option(self, theirs, ours, redis_client, library):
        """Of two equal calls one is sent, by each of the two."""
        for task in (theirs(library, library.drops), ours(lock_on_duplicate="return")):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.delay(7)
            task.delay(8)
            assert messages(redis_client) == 2

    @of_all
    def test_arguments_that_make_the_key(self, theirs, ours, redis_client, library):
        """A second export of the same corp in another format is a duplicate."""
        for task in (theirs(library, library.by_corp), ours(lock_key="export:<corp_id>")):
            redis_client.delete(QUEUE)
            task.delay(7, "csv")
            task.delay(7, "pdf")
            task.delay(8, "csv")
            assert messages(redis_client) == 2

    @of_each("different", [2, 1, 2])
    def test_all_arguments_make_the_key(self, theirs, ours, redis_client, library, different):
        """Here it does not matter whether an argument is given by its name or by its place."""
        for task, sent in ((theirs(library, library.drops), different), (ours(), 1)):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.delay(corp_id=7)
            assert messages(redis_client) == sent

    @of_all
    def test_a_duplicate_is_an_exception(self, theirs, ours, redis_client, library):
        """Each has the first one's id, except celery-once's, which has the seconds to go."""
        module, name, what = library.error
        task = theirs(library, library.raises)
        first = task.delay(7)
        with pytest.raises(getattr(pytest.importorskip(module), name)) as refusal:
            task.delay(7)
        told = getattr(refusal.value, what)
        assert told == first.id or (what == "countdown" and 0 < told <= HOUR)
        task = ours(lock_key="export:<corp_id>", lock_on_duplicate="raise")
        first = task.delay(7)
        with pytest.raises(DuplicateTaskError) as caught:
            task.delay(7)
        assert (caught.value.key, caught.value.id) == ("export:7", first.id)
        assert messages(redis_client) == 2

    @of_each("has_the_id", [True, False, True])
    def test_a_duplicate_is_no_exception(self, theirs, ours, library, has_the_id):
        """Ours has the first one's result, as celery-singleton's and celery-heimdall's have."""
        task = theirs(library, library.drops)
        first, second = task.delay(7), task.delay(7)
        assert second.id == (first.id if has_the_id else None)
        task = ours(lock_on_duplicate="return")
        first, second = task.delay(7), task.delay(7)
        assert (second.id, second.duplicate) == (first.id, True)

    @of_each(
        "options",
        [
            {"lock_expiry": 60},
            {"once": {"timeout": 60}},
            {"heimdall": {**QUICK, "unique_timeout": 60}},
        ],
    )
    def test_an_expiry(self, theirs, ours, redis_client, library, options):
        """Counted from the sending, if nobody ends it sooner."""
        theirs(library, options).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        ours(lock_unique_for=60).delay(7)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)

    @of_all
    def test_no_expiry_given(self, theirs, ours, redis_client, library):
        """celery-singleton's never ends; the others' and ours after an hour."""
        theirs(library, library.drops).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)
        ours().delay(7)
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)

    @of(CELERY_SINGLETON)
    def test_settings_for_all_tasks_of_singleton(self, app, theirs, ours, redis_client, library):
        """The app's defaults for a duplicate, the expiry and the names."""
        app.conf.singleton_raise_on_duplicate = True
        app.conf.singleton_lock_expiry = 60
        app.conf.singleton_key_prefix = "shop-theirs:"
        app.conf.dislock_unique_for = 60
        app.conf.dislock_on_duplicate = "raise"
        app.conf.dislock_prefix = "shop-ours"
        for task, names in (
            (theirs(library, {}), "shop-theirs:*"),
            (ours(), "shop-ours:*:unique"),
        ):
            task.delay(7)
            assert expiry_of(redis_client, redis_client.keys(names)) == about(60)
            with pytest.raises(Exception, match=r"duplicate|is there already"):
                task.delay(7)

    @of(CELERY_SINGLETON)
    def test_the_url_of_the_locks(self, app, theirs, ours, redis_url, library):
        """Both take the broker if nothing is set, and may use another database."""
        url = database(redis_url, 1)
        app.conf.singleton_backend_url = app.conf.dislock_url = url
        with redis.Redis.from_url(url, decode_responses=True) as other:
            theirs(library, {}).delay(7)
            ours().delay(7)
            assert len(locks_of(other, library)) == len(reservations(other)) == 1

    @of(CELERY_SINGLETON)
    def test_options_of_the_connections(self, app, theirs, ours, redis_client, library):
        """Both pass them to redis-py; names of clients, for example."""
        app.conf.singleton_backend_kwargs = {"client_name": "theirs"}
        app.conf.dislock_transport_options = {"client_name": "ours"}
        theirs(library, {}).delay(7)
        ours().delay(7)
        assert {"theirs", "ours"} <= {client["name"] for client in redis_client.client_list()}

    @of(CELERY_SINGLETON)
    def test_clear_locks_leaves_ours(self, app, theirs, ours, redis_client, library):
        """It ends what celery-singleton left behind, and may be called when ours are in use."""
        theirs(library, {}).delay(7)
        ours().delay(7)
        pytest.importorskip("celery_singleton").clear_locks(app)
        assert locks_of(redis_client, library) == []
        assert len(reservations(redis_client)) == 1

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ({"unique_on": ["corp_id"]}, "lock_key"),
            ({"unique_on": None}, "lock_key"),
            ({"raise_on_duplicate": True}, "lock_on_duplicate='raise'"),
            ({"lock_expiry": 60}, "lock_unique_for"),
            ({"simulate": True}, "dislock_enabled=False"),
            ({"once": {"keys": ["corp_id"]}}, "lock_key"),
            ({"once": {"graceful": True}}, "lock_on_duplicate='return'"),
            ({"once": {"timeout": 60}}, "lock_unique_for"),
            ({"once": {"unlock_before_run": True}}, "lock_unique_until"),
            ({"heimdall": {"unique": True}}, "lock_unique_until='end'"),
            ({"heimdall": {"times": 2, "per": 60}}, "no limit of tasks per time"),
        ],
        ids=str,
    )
    def test_an_option_that_was_left_is_refused(self, app, option, told):
        """The error names the option of ours."""
        assert told in refused(app, **option)

    @of(CELERY_ONCE)
    def test_an_option_of_one_call(self, theirs, ours, redis_client, library):
        """There a call has its own expiry; here the task decides, and `once` does nothing."""
        theirs(library, {}).apply_async((7,), once={"timeout": 60})
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        task = ours(lock_on_duplicate="raise")
        task.apply_async((7,), once={"timeout": 60})
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)
        with pytest.raises(DuplicateTaskError):
            task.apply_async((7,), once={"graceful": True})

    @of(CELERY_ONCE)
    def test_the_setting_once(self, app, theirs, ours, redis_client, library):
        """Its `default_timeout` is `dislock_unique_for`."""
        app.conf.ONCE["settings"]["default_timeout"] = 60
        app.conf.dislock_unique_for = 60
        theirs(library, {}).delay(7)
        ours().delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)

    @of(CELERY_SINGLETON, CELERY_ONCE)
    def test_one_key_is_freed_by_hand(self, theirs, ours, redis_client, library):
        """Both are one key of Redis; the next call is sent."""
        task, free = (
            theirs(library, library.drops),
            {
                CELERY_SINGLETON: lambda task: task.release_lock(task_args=[7]),
                CELERY_ONCE: lambda task: task.once_backend.clear_lock(task.get_key((7,))),
            }[library],
        )
        task.delay(7)
        free(task)
        task.delay(7)
        task = ours(lock_key="export:<corp_id>")
        task.delay(7)
        redis_client.delete("dislock:{export:7}:unique")
        task.delay(7)
        assert messages(redis_client) == 4

    @of(CELERY_HEIMDALL)
    def test_once_per_interval(self, theirs, ours, redis_client, library):
        """The key is taken for its whole time, also if the task has ended."""
        waits = {**QUICK, "unique_timeout": 60, "unique_wait_for_expiry": True}
        task = theirs(library, {"heimdall": waits})
        task.delay(7)
        task.after_return("SUCCESS", 7, "id", [7], {}, None)
        assert task.delay(7).id
        ours(lock_unique_until="expiry", lock_unique_for=60).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)
        assert messages(redis_client) == 2

    @of(CELERY_HEIMDALL)
    def test_a_duplicate_waits_for_no_lock(self, theirs, ours, monkeypatch, library):
        """celery-heimdall asks again for a second; ours asks once for each call."""
        asked = []

        def counting(cls: Any, name: str) -> None:
            ask = getattr(cls, name)

            def count(*args: Any, **kwargs: Any) -> Any:
                asked.append(name)
                return ask(*args, **kwargs)

            monkeypatch.setattr(cls, name, count)

        counting(Reservations, "reserve")
        counting(RedisLock, "do_acquire")
        heimdall = {"unique": True, "unique_lock_timeout": 0.5}
        for task in (theirs(library, {"heimdall": heimdall}), ours()):
            for _ in range(2):
                task.delay(7)
        assert asked.count("do_acquire") > 2
        assert asked.count("reserve") == 2


class TestWhenSending:
    """The table of behaviour: what is sent, and what callers get."""

    @of_each("theirs_gets", [7, None, 7])
    def test_the_second_caller_waits_for_the_first(self, app, theirs, ours, library, theirs_gets):
        """get() of the second returns the first one's value; celery-once's has none."""
        second = []
        for task in (theirs(library, library.drops), ours()):
            task.delay(7)
            second.append(task.delay(7))
        with worker(app):
            assert [result.get(timeout=LIMIT) for result in second] == [theirs_gets, 7]
        assert second[0].state == ("SUCCESS" if theirs_gets else "REJECTED")

    @of_all
    def test_a_default_that_is_given_is_the_same_call(self, theirs, ours, redis_client, library):
        """f(7) and f(7, "csv") mean the same, and are one key here."""
        for task, sent in ((theirs(library, library.drops), 2), (ours(), 1)):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.delay(7, "csv")
            assert messages(redis_client) == sent

    @of_each("keys", [2, 1, 2])
    def test_different_arguments_never_share_a_key(self, theirs, ours, redis_client, library, keys):
        """celery-once joins texts with underscores, which the arguments may have in them."""

        def join(a, b): ...

        for task, sent in ((theirs(library, library.drops, join), keys), (ours(join), 2)):
            redis_client.delete(QUEUE)
            task.delay("1_b-2", "3")
            task.delay("1", "2_b-3")
            assert messages(redis_client) == sent

    @of_each("left", [0, 1, 1])
    def test_a_message_that_was_never_sent_frees_its_key(
        self, app, theirs, ours, redis_url, redis_client, library, left
    ):
        """celery-once and celery-heimdall keep the lock for an hour; ours is given back."""
        app.conf.singleton_backend_url = app.conf.dislock_url = redis_url
        app.conf.result_backend = redis_url  # where celery-heimdall has its locks
        app.conf.broker_url = NOWHERE
        app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0}
        for task in (theirs(library, library.drops), ours()):
            with pytest.raises(OperationalError):
                task.apply_async((7,), retry=False)
        assert len(locks_of(redis_client, library)) == left
        assert reservations(redis_client) == []

    @of_all
    def test_a_sender_that_dies_blocks_its_key_for_seconds(
        self, app, theirs, ours, redis_client, monkeypatch, library
    ):
        """What is in Redis while a message is published stays there if the sender is killed."""
        seen = []
        real = app.amqp.send_task_message

        def names() -> list[str]:
            return locks_of(redis_client, library) if not seen else reservations(redis_client)

        def look(*args: Any, **kwargs: Any) -> Any:
            seen.append(expiry_of(redis_client, names()))
            return real(*args, **kwargs)

        monkeypatch.setitem(app.amqp.__dict__, "send_task_message", look)
        theirs(library, library.drops).delay(7)
        ours().delay(7)
        assert seen == [about(library.expiry), pytest.approx(PUBLISH_FOR / 2, abs=PUBLISH_FOR / 2)]

    @of_all
    def test_a_task_that_is_sent_by_its_name_is_unique(
        self, app, theirs, ours, redis_client, library
    ):
        """The others look when apply_async of the task is called, and nowhere else."""
        for task, sent in ((theirs(library, library.drops), 2), (ours(), 1)):
            redis_client.delete(QUEUE)
            app.finalize()
            for _ in range(2):
                app.send_task(task.name, (7,))
            assert messages(redis_client) == sent

    @of_all
    def test_a_callback_is_not_lost(self, theirs, ours, redis_client, library):
        """A duplicate with a callback is dropped there with its callback; here it is sent."""
        for task, sent in ((theirs(library, library.drops), 1), (ours(), 2)):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.apply_async((7,), link=task.si(8))
            assert messages(redis_client) == sent
            chain(task.si(7), task.si(8)).delay()
            assert messages(redis_client) == 2 * sent - 1

    @of_all
    def test_a_group_is_sent_whole(self, app, theirs, ours, redis_client, library):
        """So is a chord, which would never end with a member less."""
        for task, sent in ((theirs(library, library.drops), 1), (ours(), 2)):
            redis_client.flushdb()
            group([task.si(7), task.si(7)]).apply_async()
            assert messages(redis_client) == sent
            redis_client.flushdb()
            chord([task.si(7), task.si(7)])(task.si(8))
            assert messages(redis_client) == sent

    @of_all
    def test_a_countdown_is_added(self, theirs, ours, redis_client, library):
        """A task for tomorrow keeps its key until tomorrow, and lock_unique_for more."""
        theirs(library, library.drops).apply_async((7,), countdown=DAY)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)
        ours().apply_async((7,), countdown=DAY)
        assert expiry_of(redis_client, reservations(redis_client)) == about(DAY + HOUR)

    @of_all
    def test_what_is_purged_is_free_after_its_expiry(
        self, app, theirs, ours, redis_client, library
    ):
        """Nobody hears of a purge; celery-singleton's lock stays for ever."""
        theirs(library, library.drops).delay(7)
        ours().delay(7)
        app.control.purge()
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)

    @of_all
    def test_a_lock_server_that_is_away_stops_no_sender(
        self, app, theirs, ours, redis_client, library
    ):
        """There delay() raises; here the message is sent without a reservation."""
        app.conf.singleton_backend_url = app.conf.dislock_url = NOWHERE
        app.conf.ONCE["settings"]["url"] = app.conf.result_backend = NOWHERE
        with pytest.raises(redis.ConnectionError):
            theirs(library, library.drops).apply_async((7,), ignore_result=True)
        assert messages(redis_client) == 0
        ours().apply_async((7,), ignore_result=True)
        assert messages(redis_client) == 1

    @of_all
    def test_messages_of_before_run_after_the_change(
        self, app, theirs, redis_client, redis_url, library
    ):
        """They have no reservation, and run; the other library's lock stays, as nobody ends it."""
        result = theirs(library, library.drops, name="shop.export").delay(7)
        assert len(locks_of(redis_client, library)) == 1
        with Celery(
            "new", broker=redis_url, backend="cache+memory://", set_as_current=False
        ) as new:
            Dislock(new)
            new.task(base=SingletonTask, name="shop.export", shared=False, lock_unique_until="end")(
                export
            )
            with worker(new):
                wait_for(lambda: result.state == "SUCCESS")
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)

    @of_all
    def test_senders_without_a_reservation_leave_nothing(
        self, app, theirs, redis_client, redis_url, library
    ):
        """Messages of ours without lock_unique_until run in workers with the other library."""
        theirs(library, library.drops, name="shop.export")
        with Celery(
            "new", broker=redis_url, backend="cache+memory://", set_as_current=False
        ) as new:
            Dislock(new)
            sender = new.task(base=SingletonTask, name="shop.export", shared=False)(export)
            results = [sender.delay(7) for _ in range(2)]
            with worker(app):
                assert [result.get(timeout=LIMIT) for result in results] == [7, 7]
                wait_for(lambda: not locks_of(redis_client, library))
        assert reservations(redis_client) == []

    def test_a_worker_without_the_option_ends_the_reservation(
        self, app, ours, redis_client, redis_url
    ):
        """What a sender with lock_unique_until has reserved is in the message's headers."""
        result = ours(name="shop.export").delay(7)
        assert len(reservations(redis_client)) == 1
        with Celery(
            "one", broker=redis_url, backend="cache+memory://", set_as_current=False
        ) as one:
            Dislock(one)
            one.task(base=SingletonTask, name="shop.export", shared=False)(export)
            with worker(one):
                assert result.get(timeout=LIMIT) == 7
                wait_for(lambda: not reservations(redis_client))

    def test_a_worker_of_before_leaves_the_reservation(self, app, ours, redis_client, redis_url):
        """It knows nothing of it: the reservation ends after lock_unique_for."""
        result = ours(name="shop.export").delay(7)
        with Celery(
            "old", broker=redis_url, backend="cache+memory://", set_as_current=False
        ) as old:
            old.task(name="shop.export", shared=False)(export)
            with worker(old):
                assert result.get(timeout=LIMIT) == 7
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)


class TestWhenRunning:
    """The second table of behaviour: what becomes of the key when the task comes to a worker."""

    @of_all
    def test_two_never_run_at_the_same_time(self, app, theirs, ours, redis_client, library):
        """After the expiry a second is sent; there both run, here the second is skipped."""
        meeting = threading.Barrier(2, timeout=LIMIT)
        started, may_end = threading.Event(), threading.Event()

        def meet(corp_id):
            started.set()
            meeting.wait()

        def run(corp_id):
            started.set()
            may_end.wait(LIMIT)

        with_two_threads = {"pool": "threads", "concurrency": 2}
        for task in (theirs(library, library.drops, meet), ours(run)):
            started.clear()
            first = task.delay(7)
            with worker(app, **with_two_threads):
                assert started.wait(LIMIT)
                redis_client.delete(*locks_of(redis_client, library), *reservations(redis_client))
                second = task.delay(7)
                if task.name == "ours":
                    wait_for(lambda result=second: result.state == "REVOKED")
                    may_end.set()
                else:
                    second.get(timeout=LIMIT)
                first.get(timeout=LIMIT)
        assert not meeting.broken

    @of_all
    @pytest.mark.parametrize("outcome", ["success", "failure"])
    def test_a_task_that_ends_frees_its_key(
        self, app, theirs, ours, redis_client, library, outcome
    ):
        """As in the other libraries, whether it succeeds or fails."""

        def body(corp_id):
            if outcome == "failure":
                raise ValueError(corp_id)

        both = [theirs(library, library.drops, body).delay(7), ours(body).delay(7)]
        with worker(app):
            wait_for(lambda: all(result.ready() for result in both))
            wait_for(lambda: not locks_of(redis_client, library))
            wait_for(lambda: not reservations(redis_client))

    @of_each("runs", [1, 2, 1])
    def test_a_retry_runs(self, app, theirs, ours, redis_client, library, runs):
        """A retry has the same id and passes; only celery-once lets it pass as well."""
        ran: list[tuple[str, int]] = []

        def body(self, corp_id):
            ran.append((self.name, len(reservations(redis_client))))
            if self.request.retries == 0:
                raise self.retry(countdown=0)

        task = theirs(library, library.drops, body, bind=True)
        result = task.delay(7)
        own = ours(body, bind=True).delay(7)
        with worker(app):
            own.get(timeout=LIMIT)
            wait_for(lambda: result.state == ("SUCCESS" if runs == 2 else "RETRY"))
            wait_for(lambda: not reservations(redis_client))
        assert [name for name, _ in ran].count("theirs") == runs
        assert [held for name, held in ran if name == "ours"] == [1, 1]
        assert len(locks_of(redis_client, library)) == (0 if runs == 2 else 1)

    @of_all
    def test_what_is_revoked_is_free(self, app, theirs, ours, redis_client, library):
        """The worker that drops the message ends its reservation; there the lock stays."""
        both = [theirs(library, library.drops).delay(7), ours().delay(7)]
        state.revoked.update(result.id for result in both)
        try:
            with worker(app):
                wait_for(lambda: all(result.state == "REVOKED" for result in both))
                wait_for(lambda: not reservations(redis_client))
        finally:
            for result in both:
                state.revoked.discard(result.id)
        assert len(locks_of(redis_client, library)) == 1

    @of_all
    def test_what_expires_is_free(self, app, theirs, ours, redis_client, library):
        """As for a task that is revoked."""
        both = [
            task.apply_async((7,), expires=datetime.now(timezone.utc) - timedelta(seconds=1))
            for task in (theirs(library, library.drops), ours())
        ]
        with worker(app):
            wait_for(lambda: all(result.state == "REVOKED" for result in both))
            wait_for(lambda: not reservations(redis_client))
        assert len(locks_of(redis_client, library)) == 1

    @of_all
    @pytest.mark.parametrize("error", [Ignore, Reject])
    def test_what_ignores_or_rejects_is_free(self, app, theirs, ours, redis_client, library, error):
        """There is no result, and no lock is left here; there it stays."""
        ran = []

        def body(self, corp_id):
            ran.append(self.name)
            raise error("none" if error is Ignore else "no")

        theirs(library, library.drops, body, bind=True, acks_late=True).delay(7)
        ours(body, bind=True, acks_late=True).delay(7)
        with worker(app):
            wait_for(lambda: len(ran) == 2)
            wait_for(lambda: not reservations(redis_client))
        assert len(locks_of(redis_client, library)) == 1

    @of_all
    def test_the_last_step_of_a_chain_is_not_lost(self, app, theirs, ours, redis_client, library):
        """A step that is a duplicate is dropped there, and the chain's result never comes."""
        first = app.task(export, name="first", shared=False)
        both = [theirs(library, library.drops), ours()]
        for task in both:
            task.delay(7)
        app.control.purge()  # and the keys stay taken
        results = [chain(first.si(7), task.si(7)).delay() for task in both]
        with worker(app):
            assert results[1].get(timeout=LIMIT) == 7
            assert results[0].parent.get(timeout=LIMIT) == 7
        assert messages(redis_client) == 0
        assert results[0].state == "PENDING"

    @of_each("locked", [[1, 0], [1, 0], [1]])
    def test_a_task_ends_no_other_reservation(
        self, app, theirs, ours, redis_client, library, locked
    ):
        """The first to end deletes the second one's lock there; here the id is compared.

        celery-heimdall's first does not run at all, and deletes the lock of the second.
        """
        seen: dict[str, list[int]] = {"theirs": [], "ours": []}

        def held(name):
            return reservations(redis_client) if name == "ours" else locks_of(redis_client, library)

        def body(self, corp_id):
            seen[self.name].append(len(held(self.name)))

        results = []
        for task in (theirs(library, library.drops, body, bind=True), ours(body, bind=True)):
            task.delay(7)
            redis_client.delete(*held(task.name))  # as its expiry does
            results.append(task.delay(7))
        with worker(app):
            for result in results:
                result.get(timeout=LIMIT)
        assert seen == {"theirs": locked, "ours": [1, 1]}

    @of_all
    def test_arguments_may_change_in_the_body(self, app, theirs, ours, redis_client, library):
        """The key travels with the message; there it is built again from the arguments."""

        def body(rows):
            rows.append("total")

        both = [theirs(library, library.drops, body).delay([7]), ours(body).delay([7])]
        with worker(app):
            for result in both:
                result.get(timeout=LIMIT)
            wait_for(lambda: not reservations(redis_client))
        assert len(locks_of(redis_client, library)) == 1

    @of(CELERY_ONCE)
    @pytest.mark.parametrize("more", [{"lock_limit": None}, {"lock_on_conflict": "queue"}], ids=str)
    def test_the_next_is_sent_when_this_one_starts(
        self, app, theirs, ours, redis_client, library, more
    ):
        """Until it starts a duplicate is dropped, and from then on the next one is sent."""
        ran: list[str] = []
        declared: dict[str, Task] = {}

        def body(self, corp_id):
            ran.append(self.name)
            if ran.count(self.name) == 1:
                declared[self.name].delay(corp_id)

        once = {"once": {"graceful": True, "unlock_before_run": True}}
        declared["theirs"] = theirs(library, once, body, bind=True)
        declared["ours"] = ours(body, bind=True, lock_unique_until="start", **more)
        for task in declared.values():
            task.delay(7)
            task.delay(7)
        with worker(app):
            wait_for(lambda: len(ran) == 4)
            wait_for(lambda: not reservations(redis_client))
        assert (ran.count("theirs"), ran.count("ours")) == (2, 2)

    @of(CELERY_ONCE)
    def test_without_a_lock_two_may_run(self, app, theirs, ours, library):
        """With lock_limit=None ours is unique in the queue only, as unlock_before_run is."""
        meetings = {name: threading.Barrier(2, timeout=LIMIT) for name in ("theirs", "ours")}
        declared: dict[str, Task] = {}

        def body(self, corp_id):
            if not meetings[self.name].n_waiting:
                declared[self.name].delay(corp_id)
            meetings[self.name].wait()
            return "met"

        once = {"once": {"graceful": True, "unlock_before_run": True}}
        declared["theirs"] = theirs(library, once, body, bind=True)
        declared["ours"] = ours(body, bind=True, lock_unique_until="start", lock_limit=None)
        results = [task.delay(7) for task in declared.values()]
        with worker(app, pool="threads", concurrency=4):
            assert [result.get(timeout=LIMIT) for result in results] == ["met", "met"]


class ByHand:
    """A lock as many projects write it, on a store that adds a name unless it is there."""

    def __init__(self, add: Callable[..., Any], delete: Callable[[str], Any]) -> None:
        self.add = add
        self.delete = delete

    def run(self, corp_id: int, body: Callable[[], Any], expiry: float = 600) -> Any:
        """Run a body unless the lock of this corp is taken."""
        if not self.add(f"by-hand:{corp_id}", expiry):
            return None
        try:
            return body()
        finally:
            self.delete(f"by-hand:{corp_id}")


@pytest.fixture(params=["SET NX", "cache.add"])
def by_hand(request: pytest.FixtureRequest, redis_client: redis.Redis) -> ByHand:
    """The lock on Redis, and on Django's cache."""
    if request.param == "SET NX":

        def add(key: str, expiry: float) -> bool:
            return bool(redis_client.set(key, "1", nx=True, px=int(expiry * 1000)))

        return ByHand(add, redis_client.delete)
    cache = cache_in_memory(request.node.name)
    return ByHand(lambda key, expiry: cache.add(key, "1", timeout=expiry), cache.delete)


def configure_django() -> None:
    """Give Django its default settings, because other tests look at all objects of this process."""
    settings = pytest.importorskip("django.conf").settings
    if not settings.configured:
        settings.configure()


def cache_in_memory(name: str) -> Any:
    """Make a cache as Django has it by default."""
    locmem = pytest.importorskip("django.core.cache.backends.locmem")
    configure_django()
    return locmem.LocMemCache(name, {})


@pytest.fixture
def dislock(app: Celery) -> Dislock:
    """Our locks for plain Python, of the same app."""
    return Dislock(app)


class TestByHand:
    """The tables for SET NX and for Django's cache."""

    @pytest.fixture
    def task(self, ours):
        """A task that runs a body which it is given, with a lock when it runs only."""

        def declare(body, **options):
            def run(self, corp_id):
                return body()

            options = {"lock_key": "export:<corp_id>", "lock_unique_until": None, **options}
            return ours(run, bind=True, **options)

        return declare

    def test_a_key_by_hand(self, by_hand, task, dislock):
        """One corp at a time; the two libraries' locks do not know each other."""
        ran = []
        exports = task(lambda: ran.append("ours"))

        def body():
            by_hand.run(7, lambda: ran.append("theirs"))
            by_hand.run(8, lambda: ran.append("theirs, of 8"))
            exports.apply((7,))

        by_hand.run(7, body)
        with dislock.lock("export:7"):
            exports.apply((7,))
            exports.apply((8,))
        assert ran == ["theirs, of 8", "ours", "ours"]

    def test_a_long_body_keeps_its_lock(self, by_hand, task, dislock, redis_client):
        """By hand the expiry ends the lock, and a second begins; here the lock is renewed."""
        ran = []
        by_hand.run(
            7,
            lambda: wait_for(lambda: bool(by_hand.run(7, lambda: ran.append("second") or True))),
            expiry=0.05,
        )
        assert ran == ["second"]

        def body():
            left = redis_client.pttl("dislock:{export:7}")
            lowest = [left]

            def renewed() -> bool:
                lowest[0] = min(lowest[0], left := redis_client.pttl("dislock:{export:7}"))
                return left > lowest[0]

            wait_for(renewed)
            return "long"

        assert task(body, lock_watchdog_timeout=3).apply((7,)).get() == "long"

    def test_an_end_frees_no_other_lock(self, by_hand, task, redis_client):
        """By hand the first to end deletes the second's lock; here it is the owner's."""
        by_hand.add("by-hand:7", 600)

        def expires():
            by_hand.delete("by-hand:7")  # as its expiry does
            by_hand.add("by-hand:7", 600)  # the second

        by_hand.delete("by-hand:7")
        by_hand.run(7, expires)
        assert by_hand.add("by-hand:7", 600)  # a third begins beside the second

        def lost():
            redis_client.rename("dislock:{export:7}", "theirs")
            redis_client.hset("dislock:{export:7}", "somebody", "else")

        task(lost).apply((7,))
        assert redis_client.hgetall("dislock:{export:7}") == {"somebody": "else"}

    def test_a_second_run_returns_at_once(self, app, by_hand, task, dislock):
        """By hand it succeeds with None; here its result says that it did not run."""
        assert by_hand.run(7, lambda: by_hand.run(7, lambda: "ran")) is None
        result = task(lambda: "ran").delay(7)
        with dislock.lock("export:7"), worker(app):
            wait_for(lambda: result.state == "REVOKED")

    def test_a_second_run_fails(self, task, dislock):
        """With LockHeldError, which names who holds the lock."""
        with dislock.lock("export:7"):
            result = task(lambda: "ran", lock_on_conflict="raise").apply((7,))
        assert isinstance(result.result, LockHeldError)
        assert result.result.holder

    def test_a_second_run_waits(self, task, dislock):
        """For lock_wait_timeout at most; then it fails."""
        waits = task(lambda: "ran", lock_on_conflict="wait", lock_wait_timeout=0.05)
        with dislock.lock("export:7"):
            assert isinstance(waits.apply((7,)).result, LockHeldError)
        assert waits.apply((7,)).result == "ran"

    def test_a_second_run_comes_again(self, app, task, dislock):
        """It is sent again under its own id; its own retries are not spent."""
        again = task(lambda: "ran", lock_on_conflict="retry", max_retries=0)
        with worker(app):
            with dislock.lock("export:7"):
                result = again.delay(7)
                wait_for(lambda: result.state == "RETRY")
            assert result.get(timeout=LIMIT) == "ran"

    def test_an_end_frees_the_lock(self, by_hand, task, redis_client):
        """Also after an exception; there is nothing to write for it."""
        with pytest.raises(ZeroDivisionError):
            by_hand.run(7, lambda: 1 / 0)
        assert by_hand.run(7, lambda: "ran") == "ran"
        fails = task(lambda: 1 / 0)
        assert fails.apply((7,)).state == fails.apply((7,)).state == "FAILURE"
        assert redis_client.keys("dislock:*") == []

    def test_at_most_once_in_a_while(self, by_hand, task, redis_client):
        """A lock that nobody deletes, and one that is held for a minimum time."""
        assert [by_hand.add("by-hand:7", 600) for _ in range(2)] == [True, False]
        seldom = task(lambda: "ran", lock_at_least_for=600)
        assert [seldom.apply((7,)).state for _ in range(2)] == ["SUCCESS", "IGNORED"]
        assert redis_client.ttl("dislock:{export:7}") == about(600)

    def test_a_lock_that_is_taken_before_sending(self, by_hand, ours, redis_client):
        """By hand: add, then delay(), and the task deletes it."""
        plain = ours(name="plain", lock_key=False, lock_unique_until=None)
        for _ in range(2):
            if by_hand.add("by-hand:7", 600):
                plain.delay(7)
        assert messages(redis_client) == 1
        unique = ours(lock_key="export:<corp_id>")
        for _ in range(2):
            unique.delay(7)
        assert messages(redis_client) == 2

    def test_a_lock_in_plain_python(self, by_hand, task, dislock):
        """A view, a command or a part of a task takes the same lock as the task."""
        assert by_hand.run(7, lambda: by_hand.run(7, lambda: "ran")) is None
        with dislock.lock("export:7", timeout=0), pytest.raises(LockHeldError):
            task(lambda: "ran", lock_on_conflict="raise").apply((7,), throw=True)

    def test_a_cache_in_memory_is_of_one_process(self):
        """Django's default cache: two processes take the same lock; ours is on the server."""
        cache = cache_in_memory("")
        program = (
            "from django.core.cache.backends.locmem import LocMemCache;"
            "print(LocMemCache('', {}).add('by-hand:7', '1'))"
        )
        assert cache.add("by-hand:7", "1")
        other = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        assert other.stdout.strip() == "True"

    def test_other_entries_evict_no_lock(self, task, redis_client):
        """A cache in memory keeps 300 entries, and drops others for new ones."""
        cache = cache_in_memory("culls")
        cache.add("by-hand:7", "1", timeout=600)
        for number in range(1000):
            cache.set(f"page:{number}", "...")
        assert cache.add("by-hand:7", "1")

        def body():
            with redis_client.pipeline() as pipe:
                for number in range(1000):
                    pipe.set(f"page:{number}", "...")
                pipe.execute()
            return redis_client.exists("dislock:{export:7}")

        assert task(body).apply((7,)).get() == 1

    def test_a_cache_that_is_cleared(self, task, redis_url, redis_client):
        """clear() of Django's Redis cache empties its database: give the locks another one."""
        redis_cache = pytest.importorskip("django.core.cache.backends.redis")
        configure_django()
        cache = redis_cache.RedisCache(database(redis_url, 1), {})
        cache.add("by-hand:7", "1", timeout=600)

        def body():
            cache.clear()
            return redis_client.exists("dislock:{export:7}")

        assert task(body).apply((7,)).get() == 1
        assert cache.add("by-hand:7", "1")
        cache.close()


class TestBeat:
    """The table for RedBeat."""

    @pytest.fixture
    def redbeat(self, app, redis_url):
        """RedBeat's module, if it is installed."""
        module = pytest.importorskip("redbeat.schedulers")
        app.conf.redbeat_redis_url = redis_url
        return module

    @pytest.fixture
    def entry(self, app, ours):
        """A schedule's entry of a task of ours, of which one message per half hour is sent."""
        task = ours(lock_unique_until="expiry", lock_unique_for=1800)
        return ScheduleEntry("hourly", task.name, schedule=HOUR, args=(7,), app=app)

    def beats(self, app):
        return [Scheduler(app, lazy=True) for _ in range(2)]

    def test_two_beats_send_one_message(self, app, entry, redis_client):
        """Beats without a lock of their own: the second one's message is a duplicate."""
        first, second = [beat.apply_async(entry, advance=False) for beat in self.beats(app)]
        assert (first.duplicate, second.duplicate) == (False, True)
        assert messages(redis_client) == 1
        assert expiry_of(redis_client, reservations(redis_client)) == about(1800)

    def test_a_beat_that_is_killed_holds_up_no_other(self, app, entry, redis_client):
        """The others go on, and send when the reservation has ended."""
        killed, other = self.beats(app)
        killed.apply_async(entry, advance=False)
        redis_client.delete(*reservations(redis_client))  # as its expiry does
        assert other.apply_async(entry, advance=False).duplicate is False

    def test_redbeat_waits_for_the_lock_of_a_dead_beat(self, app, redbeat):
        """For five times the longest pause of a beat."""
        assert redbeat.RedBeatScheduler(app, lazy=True).lock_timeout == 25 * 60

    def test_what_redbeat_sends_is_unique(self, app, redbeat, entry, redis_client):
        """RedBeat sends as any beat does, so its messages are reserved as well."""
        entry = redbeat.RedBeatSchedulerEntry(
            "hourly", entry.task, schedule=entry.schedule, args=(7,), app=app
        )
        beat = redbeat.RedBeatScheduler(app, lazy=True)
        sent = [beat.apply_async(entry, advance=False).duplicate for _ in range(2)]
        assert sent == [False, True]
        assert messages(redis_client) == 1
