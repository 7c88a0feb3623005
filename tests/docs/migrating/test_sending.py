"""What the pages say of sending: the same calls with the other library, and with ours."""

from typing import NamedTuple

import pytest
import redis
from celery import Celery, chain, chord, group
from kombu.exceptions import OperationalError

from celery_dislock import Dislock, SingletonTask
from celery_dislock.tasks.sending import PUBLISH_FOR
from tests.docs.migrating.libraries import (
    ALL,
    LIBRARIES_WARN,
    LIMIT,
    NOWHERE,
    about,
    expiry_of,
    export,
    locks_of,
    messages,
    of_all,
    of_each,
    reservations,
    worker,
)
from tests.holding import wait_for

pytestmark = LIBRARIES_WARN


class Sends(NamedTuple):
    """Calls, and how many of them are sent: there, by each library or by all of them, and here."""

    what: str
    theirs: object
    ours: int
    send: object
    ours_options: object = None


SENDS = [
    Sends("equal calls", 2, 2, lambda _, task: [task.delay(n) for n in (7, 7, 8)]),
    Sends(
        "some arguments make the key",
        2,
        2,
        lambda _, task: [task.delay(*given) for given in ((7, "csv"), (7, "pdf"), (8, "csv"))],
        {"lock_key": "export:<corp_id>"},
    ),
    Sends("by name", [2, 1, 2], 1, lambda _, task: [task.delay(7), task.delay(corp_id=7)]),
    Sends("a default", 2, 1, lambda _, task: [task.delay(7), task.delay(7, "csv")]),
    Sends(  # celery-once joins texts with underscores, which the arguments may have in them
        "different arguments",
        [2, 1, 2],
        2,
        lambda _, task: [task.delay("1_kind-2", "3"), task.delay("1", "2_kind-3")],
    ),
    Sends(  # the others look when apply_async of the task is called, and nowhere else
        "by the name of the task",
        2,
        1,
        lambda app, task: [app.send_task(task.name, (7,)) for _ in range(2)],
    ),
    Sends(
        "a callback, and a chain",
        1,
        3,
        lambda _, task: [
            task.delay(7),
            task.apply_async((7,), link=task.si(8)),
            chain(task.si(7), task.si(8)).delay(),
        ],
    ),
    Sends("group", 1, 2, lambda _, task: group([task.si(7)] * 2).apply_async()),
    Sends("chord", 1, 2, lambda _, task: chord([task.si(7)] * 2)(task.si(8))),
]


@pytest.fixture
def new(redis_url):
    """An app after the change, or before it, on the same broker."""
    with Celery("new", broker=redis_url, backend="cache+memory://", set_as_current=False) as new:
        Dislock(new)
        yield new


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

    @pytest.mark.parametrize("case", SENDS, ids=lambda case: case.what)
    @of_all
    def test_how_many_are_sent(self, app, theirs, ours, redis_client, library, case):
        """By the same calls."""
        there = case.theirs if isinstance(case.theirs, int) else case.theirs[ALL.index(library)]
        options = library.by_corp if case.ours_options else library.drops
        for task, number in (
            (theirs(library, options), there),
            (ours(**(case.ours_options or {})), case.ours),
        ):
            redis_client.flushdb()
            app.finalize()
            case.send(app, task)
            assert messages(redis_client) == number

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

        def names():
            return locks_of(redis_client, library) if not seen else reservations(redis_client)

        def look(*args, **kwargs):
            seen.append(expiry_of(redis_client, names()))
            return real(*args, **kwargs)

        monkeypatch.setitem(app.amqp.__dict__, "send_task_message", look)
        theirs(library, library.drops).delay(7)
        ours().delay(7)
        assert seen == [about(library.expiry), pytest.approx(PUBLISH_FOR / 2, abs=PUBLISH_FOR / 2)]

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
    def test_messages_of_before_run_after_the_change(self, new, theirs, redis_client, library):
        """They have no reservation, and run; the other library's lock stays, as nobody ends it."""
        result = theirs(library, library.drops, name="shop.export").delay(7)
        assert len(locks_of(redis_client, library)) == 1
        options = {"name": "shop.export", "lock_unique_until": "end"}
        new.task(base=SingletonTask, shared=False, **options)(export)
        with worker(new):
            wait_for(lambda: result.state == "SUCCESS")
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)

    @of_all
    def test_senders_without_a_reservation_leave_nothing(
        self, app, new, theirs, redis_client, library
    ):
        """Messages of ours without lock_unique_until run in workers with the other library."""
        theirs(library, library.drops, name="shop.export")
        sender = new.task(base=SingletonTask, name="shop.export", shared=False)(export)
        results = [sender.delay(7) for _ in range(2)]
        with worker(app):
            assert [result.get(timeout=LIMIT) for result in results] == [7, 7]
            wait_for(lambda: not locks_of(redis_client, library))
        assert reservations(redis_client) == []
