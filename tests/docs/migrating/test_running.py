"""What the pages say of running and of beats: with the other library, and with ours."""

import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import Ignore, Reject
from celery.worker import state

from tests.docs.migrating.libraries import (
    CELERY_HEIMDALL,
    CELERY_ONCE,
    CELERY_SINGLETON,
    HOUR,
    LIBRARIES_WARN,
    LIMIT,
    QUEUE,
    about,
    expiry_of,
    locks_of,
    messages,
    of,
    of_all,
    of_each,
    reservations,
    worker,
)
from tests.holding import wait_for

pytestmark = LIBRARIES_WARN


def states_of(results):
    """Count the results in each state."""
    return Counter(result.state for result in results)


class TestWhenRunning:
    """The second table of behaviour: what becomes of the key when the task comes to a worker."""

    @of_all
    def test_a_task_that_ends_frees_its_key(self, app, theirs, ours, redis_client, library):
        """However it ends; there the lock stays unless it succeeds or fails."""
        ended = []

        def body(self, how):
            ended.append(how)
            if how in errors:
                raise errors[how]

        errors = {"failure": ValueError(), "ignored": Ignore(), "rejected": Reject("no")}
        past = datetime.now(timezone.utc) - timedelta(seconds=1)
        both = [theirs(library, library.drops, body, bind=True, acks_late=True)]
        both.append(ours(body, bind=True, acks_late=True))
        sent = [
            [task.apply_async((how,), expires=past if how == "expired" else None) for task in both]
            for how in ("success", *errors, "revoked", "expired")
        ]
        revoked = {result.id for result in sent[-2]}
        state.revoked.update(revoked)
        try:
            with worker(app):
                wait_for(lambda: len(ended) == 8)
                wait_for(lambda: all(result.state == "REVOKED" for result in sent[-1] + sent[-2]))
                wait_for(lambda: not reservations(redis_client))
                wait_for(lambda: len(locks_of(redis_client, library)) == 4)
        finally:
            for task_id in revoked:
                state.revoked.discard(task_id)

    @of_each("runs", [1, 2, 1])
    def test_a_retry_runs(self, app, theirs, ours, redis_client, library, runs):
        """A retry has the same id and passes; only celery-once lets it pass as well."""
        ran = []

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

    @of_each("locked", [[1, 0], [1, 0], [1]])
    def test_a_task_ends_no_other_reservation(
        self, app, theirs, ours, redis_client, library, locked
    ):
        """The first to end deletes the second one's lock there; here the id is compared.

        celery-heimdall's first does not run at all, and deletes the lock of the second.
        """
        seen = {"theirs": [], "ours": []}

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


@of(CELERY_SINGLETON, CELERY_ONCE)
def test_a_redelivery_runs_beside_the_first(app, theirs, redis_client, library):
    """Two deliveries of one message run at the same time, although the lock is taken."""
    meeting = threading.Barrier(2, timeout=LIMIT)

    def body(corp_id):
        meeting.wait()

    result = theirs(library, library.drops, body).delay(7)
    (message,) = redis_client.lrange(QUEUE, 0, -1)
    redis_client.rpush(QUEUE, message)
    with worker(app, pool="threads", concurrency=2):
        result.get(timeout=2 * LIMIT)
    assert not meeting.broken


class TestBeat:
    """The table for RedBeat."""

    @pytest.mark.parametrize("kind", ["Celery's", "RedBeat's"])
    def test_two_beats_send_one_message(self, app, ours, redis_client, redis_url, kind):
        """Without a lock of their own; the other sends on when the reservation has ended."""
        if kind == "RedBeat's":
            module = pytest.importorskip("redbeat.schedulers")
            app.conf.redbeat_redis_url = redis_url
            scheduler, entry = module.RedBeatScheduler, module.RedBeatSchedulerEntry
            assert scheduler(app, lazy=True).lock_timeout == 25 * 60  # as long as it waits
        else:
            scheduler, entry = Scheduler, ScheduleEntry
        task = ours(lock_unique_until="expiry", lock_unique_for=1800)
        entry = entry("hourly", task.name, schedule=HOUR, args=(7,), app=app)
        one, other = (scheduler(app, lazy=True) for _ in range(2))
        assert one.apply_async(entry, advance=False).duplicate is False
        assert other.apply_async(entry, advance=False).duplicate is True
        assert messages(redis_client) == 1
        assert expiry_of(redis_client, reservations(redis_client)) == about(1800)
        redis_client.delete(*reservations(redis_client))  # as its expiry does
        assert other.apply_async(entry, advance=False).duplicate is False


class TestRates:
    """The rows about rates: the same tasks with celery-heimdall or Celery alone, and with ours."""

    @pytest.fixture
    def ran(self):
        """Names and arguments of the tasks that ran."""
        return []

    @pytest.fixture
    def body(self, ran):
        def body(self, corp_id):
            ran.append((self.name, corp_id))

        return body

    @pytest.fixture
    def rated(self, ours, body):
        """Declare a task of ours that is not unique when it is sent."""
        return partial(ours, body, bind=True, lock_unique_until=None, lock_on_conflict="retry")

    @of(CELERY_HEIMDALL)
    def test_a_rate_lets_the_same_number_start(self, app, theirs, rated, body, ran, library):
        """Of three tasks two start, and the third comes again."""
        limits = {"heimdall": {"times": 2, "per": 60, "key": "export"}}
        both = theirs(library, limits, body, bind=True), rated(lock_key="export", lock_rate="2/m")
        sent = [task.delay(nth) for nth in range(3) for task in both]
        with worker(app):
            wait_for(lambda: states_of(sent) == {"SUCCESS": 4, "RETRY": 2})
        assert sorted(ran) == [("ours", 0), ("ours", 1), ("theirs", 0), ("theirs", 1)]

    @of(CELERY_HEIMDALL)
    def test_a_rate_without_a_key_is_one_of_equal_arguments(
        self, app, theirs, rated, body, ran, library
    ):
        """Of two equal tasks the second comes again, and another one starts."""
        limits = {"heimdall": {"times": 1, "per": 60}}
        both = theirs(library, limits, body, bind=True), rated(lock_rate="1/m")
        sent = [task.delay(corp_id) for corp_id in (7, 7, 8) for task in both]
        with worker(app):
            wait_for(lambda: states_of(sent) == {"SUCCESS": 4, "RETRY": 2})
        assert sorted(ran) == [("ours", 7), ("ours", 8), ("theirs", 7), ("theirs", 8)]

    def test_a_rate_of_celery_is_of_a_task_and_ours_of_a_key(self, app, rated, body, ran):
        """Celery starts one task of two corporations, and ours is a rate for each of them."""
        limited = app.task(name="celerys", shared=False, bind=True, rate_limit="1/h")(body)
        both = limited, rated(lock_key="corp:<corp_id>", lock_rate="1/m")
        sent = [task.delay(corp_id) for corp_id in (7, 8, 7) for task in both]
        with worker(app):
            wait_for(lambda: states_of(sent) == {"SUCCESS": 3, "RETRY": 1, "PENDING": 2})
        assert sorted(ran) == [("celerys", 7), ("ours", 7), ("ours", 8)]
