"""What docs/migrating.md says of sending: the same calls with the other library, and with ours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group
from kombu.exceptions import OperationalError

from celery_dislock import Dislock, SingletonTask
from celery_dislock.tasks.sending import PUBLISH_FOR
from tests.docs.migrating.libraries import (
    DAY,
    HOUR,
    LIBRARIES_WARN,
    LIMIT,
    NOWHERE,
    QUEUE,
    about,
    expiry_of,
    export,
    locks_of,
    messages,
    of_all,
    of_each,
    reservations,
    wait_for,
    worker,
)

pytestmark = LIBRARIES_WARN

WORKER_OF_BEFORE = """
import sys
import redis
from celery import Celery
from celery.worker import state

app = Celery("old", broker=sys.argv[1])
client = redis.Redis.from_url(sys.argv[1])

@app.task(name="shop.export")
def export(corp_id):
    client.set("ran", corp_id)
    state.should_stop = 0

app.Worker(pool="solo", without_gossip=True, without_mingle=True).start()
assert not any(name.startswith("celery_dislock") for name in sys.modules)
"""


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
        ours(name="shop.export").delay(7)
        # In a process of its own: here this package has heard of all workers.
        command = [sys.executable, "-c", WORKER_OF_BEFORE, redis_url]
        subprocess.run(command, check=True, timeout=LIMIT)
        assert redis_client.get("ran") == "7"
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)
