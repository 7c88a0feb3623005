"""What docs/migrating.md says of locks by hand and of beats: the same with them, and with ours."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from celery.beat import ScheduleEntry, Scheduler

from celery_dislock.exceptions import LockHeldError
from tests.docs.migrating.libraries import (
    HOUR,
    LIBRARIES_WARN,
    about,
    database,
    expiry_of,
    messages,
    reservations,
)
from tests.docs.test_compared import LIMIT, wait_for, worker

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis


pytestmark = LIBRARIES_WARN


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
