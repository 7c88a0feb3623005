"""Uniqueness when sending where clocks are wrong: a sender's, and the lock server's.

When a key is free is decided by the lock server.  A sender's clock counts for one thing, as with
Celery alone: for what its message says in absolute times, an ETA and ``expires``.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.messages import outbox
from celery_dislock.servers import reservations as reservations_module
from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.reservations import Reservation, Reserved, Taken
from celery_dislock.tasks.sending import PUBLISH_FOR
from celery_dislock.tasks.task import runtime_of
from tests.integration import driven_clock
from tests.integration.driven_clock import STRETCH, clocked
from tests.integration.test_unique import LOCK, declare, messages, reserved_for

HOUR = 3600
UNIQUE_FOR = 100  # seconds
SLOW = 30  # seconds that a test may take between two of its steps


class AnyDatetime(type):
    """Lets all datetimes be of a class that replaces theirs."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, datetime)


# Seconds by which a clock is ahead of the others.
of_a_wrong_clock = pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])


@pytest.fixture
def app(redis_url):
    app = Celery("clocks", broker=redis_url, set_as_current=False)
    with Dislock(app):
        yield app
    app.close()


@pytest.fixture
def client(redis_client):
    return redis_client


@of_a_wrong_clock
class TestSenders:
    """One sender's clock is wrong by an hour.  All that it sends is sent."""

    @pytest.fixture(autouse=True)
    def sender(self, app, ahead, monkeypatch):
        """This process is that sender; its app has asked for the time once."""
        wrong, real = timedelta(seconds=ahead), time.time

        class Wrong(datetime, metaclass=AnyDatetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + wrong

        monkeypatch.setattr(time, "time", lambda: real() + ahead)
        monkeypatch.setattr(outbox, "datetime", Wrong)
        now = app.now
        monkeypatch.setattr(app, "now", lambda: now() + wrong)

    def assert_kept_for(self, client, seconds):
        assert seconds - SLOW < client.ttl(f"{LOCK}:unique") <= seconds

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({}, UNIQUE_FOR),
            ({"countdown": 600}, UNIQUE_FOR + 600),
            ({"expires": 60}, 60),
        ],
        ids=["at once", "countdown", "expires"],
    )
    def test_a_senders_clock_decides_no_reservation(self, app, client, options, kept):
        """What it says in seconds is counted by the lock server."""
        edit = declare(app, lock_unique_for=UNIQUE_FOR)
        first = edit.apply_async((1,), **options)
        self.assert_kept_for(client, kept)
        assert edit.delay(1).id == first.id
        _, _, since, *_ = client.get(f"{LOCK}:unique").split(" ")
        assert abs(int(since) / 1000 - client.time()[0]) < SLOW

    def test_a_senders_clock_and_a_debounce(self, app, client):
        """How long a burst has lasted is known to the lock server."""
        edit = declare(app, lock_on_duplicate="replace", lock_replace_for=60)
        edit.apply_async((1,), countdown=50)
        record = client.get(f"{LOCK}:unique").split(" ")
        record[3] = str(int(record[3]) - 40_000)  # the first was sent 40 s ago
        client.set(f"{LOCK}:unique", " ".join(record), px=100_000)
        edit.apply_async((1,), countdown=50)
        last = json.loads(client.lindex("celery", 0))["headers"]["eta"]
        due = (datetime.fromisoformat(last) - app.now()).total_seconds()  # for the sender
        assert 0 < due <= 20

    def test_an_eta_goes_by_the_senders_clock(self, app, client, ahead):
        """The key is kept for up to an hour more or less; never less than lock_unique_for."""
        edit = declare(app, lock_unique_for=UNIQUE_FOR)
        edit.apply_async((1,), eta=datetime.now(timezone.utc) + timedelta(seconds=600))
        self.assert_kept_for(client, UNIQUE_FOR + max(0, 600 - ahead))

    def test_a_time_of_expiry_goes_by_the_senders_clock(self, app, client, ahead):
        """For as long as lock_unique_for, or as the message must be published; then it is free."""
        edit = declare(app, lock_unique_for=UNIQUE_FOR)
        edit.apply_async((1,), expires=datetime.now(timezone.utc) + timedelta(seconds=60))
        assert messages(client) == 1
        kept = PUBLISH_FOR if ahead > 0 else UNIQUE_FOR
        assert 0 <= client.ttl(f"{LOCK}:unique") <= kept


class TestServers:
    """The lock server's clock jumps, as in a failover to a server whose clock is another."""

    @pytest.fixture
    def advance(self, client, monkeypatch):
        """Set the clock of the scripts, and of the keys' expiry, forward or back."""
        for name in ("RESERVE", "CONFIRM", "BEGIN", "UNRESERVE"):
            script = clocked(getattr(reservations_module, name))
            monkeypatch.setattr(reservations_module, name, script)
        driven_clock.start(client)
        return lambda seconds: driven_clock.advance(client, seconds)

    @pytest.fixture
    def reservations(self, app, advance, client):
        yield runtime_of(app).process.store.reservations
        for key in driven_clock.keys(client):
            assert client.pttl(key) > 0, f"{key} would stay for ever"

    @pytest.fixture
    def begin(self, reservations):
        """Let the task of a message begin, as a worker does that takes several locks."""

        def begin(task_id, until):
            reservations.begin(Reservation(LOCK, task_id, until, UNIQUE_FOR))

        return begin

    def send(self, reservations, task_id, *, replaces=False):
        """Reserve the key, and confirm that; return for how long its burst has lasted."""
        found = reservations.reserve(LOCK, task_id, PUBLISH_FOR, replaces=replaces)
        assert isinstance(found, Reserved)
        assert reservations.confirm(LOCK, task_id, UNIQUE_FOR)
        return found.burst

    def kept_for(self, client, key=f"{LOCK}:unique"):
        """Seconds until a key ends, by the server's clock."""
        return client.pttl(key) / 1000 / STRETCH

    def test_a_reservation_outlives_no_clock_that_is_set_back(self, reservations, advance, client):
        """It lasts for as much longer as the clock was set back, and not for ever."""
        self.send(reservations, "a")
        advance(-HOUR)
        assert reservations.reserve(LOCK, "b", PUBLISH_FOR, replaces=False) == Taken(
            "a", is_sent=True
        )
        assert UNIQUE_FOR < self.kept_for(client) <= UNIQUE_FOR + HOUR
        advance(HOUR + UNIQUE_FOR)
        self.send(reservations, "b")

    @pytest.mark.parametrize("until", ["start", "end"])
    @of_a_wrong_clock
    def test_a_task_ends_its_reservation_whatever_the_clock_says(
        self, reservations, advance, client, begin, until, ahead
    ):
        """Ids are compared, and no times: a clock that jumps keeps nobody's key."""
        self.send(reservations, "a")
        advance(ahead)
        begin("a", until)
        if until == "end":
            assert reserved_for(client) == "a"
            assert reservations.end(LOCK, "a")
        assert reserved_for(client) is None

    def test_a_clock_that_goes_forward_ends_a_reservation(
        self, reservations, advance, client, begin
    ):
        """A second message is sent, and the first ends nothing of its reservation."""
        self.send(reservations, "a")
        advance(HOUR)
        assert reserved_for(client) is None
        self.send(reservations, "b")
        for until in ("start", "end"):
            begin("a", until)
        assert not reservations.end(LOCK, "a")
        assert reserved_for(client) == "b"

    def test_a_clock_that_goes_forward_forgets_a_replacement(
        self, reservations, advance, client, begin
    ):
        """What was replaced runs as well, and leaves the key to the newer message."""
        for task_id in "ab":
            self.send(reservations, task_id, replaces=True)
        advance(HOUR)
        self.send(reservations, "c", replaces=True)
        begin("a", "start")
        assert reserved_for(client) == "c"

    def test_a_burst_is_never_older_than_the_clock(self, reservations, advance):
        """Else a debounce would be postponed for an hour beyond lock_replace_for."""
        self.send(reservations, "a", replaces=True)
        advance(20)
        assert self.send(reservations, "b", replaces=True) == pytest.approx(20, abs=1)
        advance(-HOUR)
        assert self.send(reservations, "c", replaces=True) == 0
        advance(30)
        assert self.send(reservations, "d", replaces=True) == pytest.approx(30, abs=1)

    def test_a_burst_ends_when_the_clock_goes_forward(self, reservations, advance, client):
        """The newest message is not postponed any more, and the older one is replaced."""
        for task_id in "ab":
            self.send(reservations, task_id, replaces=True)
        client.pexpire(f"{LOCK}:unique", 2 * HOUR * 1000 * STRETCH)  # as with a countdown
        advance(HOUR)
        assert self.send(reservations, "c", replaces=True) >= HOUR

    @pytest.mark.parametrize("when", ["before it is confirmed", "after it is confirmed"])
    @of_a_wrong_clock
    def test_what_was_replaced_does_not_run(self, reservations, advance, begin, when, ahead):
        """Whatever the clock says, if the server still has what it was told."""
        self.send(reservations, "a")
        reservations.reserve(LOCK, "b", 2 * HOUR, replaces=True)
        if when == "before it is confirmed":
            advance(ahead)
        reservations.confirm(LOCK, "b", 2 * HOUR)
        if when == "after it is confirmed":
            advance(ahead)
        with pytest.raises(Replaced):
            begin("a", "start")
