"""What docs/migrating.md says of running: the same calls with the other library, and with ours."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from celery import chain
from celery.exceptions import Ignore, Reject
from celery.worker import state

from tests.docs.migrating.libraries import (
    CELERY_ONCE,
    CELERY_SINGLETON,
    LIBRARIES_WARN,
    LIMIT,
    QUEUE,
    export,
    locks_of,
    messages,
    of,
    of_all,
    of_each,
    reservations,
    worker,
)
from tests.holding import wait_for

if TYPE_CHECKING:
    from celery import Task

pytestmark = LIBRARIES_WARN


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
