"""Uniqueness when sending where clocks are wrong: a sender's, and the lock server's.

When a key is free is decided by the lock server.  A sender's clock counts for one thing, as with
Celery alone: for what its message says in absolute times, an ETA and ``expires``.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from secrets import token_hex

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.messages import delivery
from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.reservations import Reservation, Reserved, Taken
from celery_dislock.tasks.sending import PUBLISH_FOR
from tests.holding import wait_for
from tests.integration.lua_server import LuaServer
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
        monkeypatch.setattr(delivery, "datetime", Wrong)
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
        """For as long as lock_unique_for; not at all if it has expired for its sender."""
        edit = declare(app, lock_unique_for=UNIQUE_FOR)
        edit.apply_async((1,), expires=datetime.now(timezone.utc) + timedelta(seconds=60))
        assert messages(client) == 1
        if ahead > 0:
            wait_for(lambda: reserved_for(client) is None, "the end of the reservation")
        else:
            self.assert_kept_for(client, UNIQUE_FOR)


class TestServers:
    """The lock server's clock jumps, as in a failover to a server whose clock is another."""

    @pytest.fixture
    def client(self):
        return LuaServer()

    @pytest.fixture
    def advance(self, client):
        """Set the clock of the scripts, and of the keys' expiry, forward or back."""
        return client.advance

    @pytest.fixture
    def reservations(self, client):
        yield client.store().reservations
        assert all(ttl > 0 for ttl in client.ttls().values()), "a key would stay for ever"

    def reserve(self, reservations, task_id, *, ttl=PUBLISH_FOR, replaces=False):
        wanted = Reservation(LOCK, task_id, "start", ttl)
        return reservations.reserve(wanted, token_hex(8), replaces=replaces)

    def send(self, reservations, task_id, *, replaces=False, ttl=UNIQUE_FOR):
        """Reserve the key, and confirm that; return the reservation."""
        found = self.reserve(reservations, task_id, replaces=replaces)
        assert isinstance(found, Reserved)
        sent = Reservation(LOCK, task_id, "start", ttl, found.mark, found.number)
        assert reservations.confirm(sent)
        return sent

    def burst(self, reservations, task_id):
        """Send another edition; return for how long its burst has lasted."""
        found = self.reserve(reservations, task_id, replaces=True)
        reservations.confirm(
            Reservation(LOCK, task_id, "start", UNIQUE_FOR, found.mark, found.number)
        )
        return found.burst

    def test_a_reservation_outlives_no_clock_that_is_set_back(self, reservations, advance, client):
        """It lasts for as much longer as the clock was set back, and not for ever."""
        self.send(reservations, "a")
        advance(-HOUR)
        assert self.reserve(reservations, "b") == Taken("a", is_sent=True)
        assert UNIQUE_FOR < client.ttls()[f"{LOCK}:unique"] / 1000 <= UNIQUE_FOR + HOUR
        advance(HOUR + UNIQUE_FOR + 1)
        self.send(reservations, "b")

    def test_a_reservation_is_kept_by_who_knows_whether_its_task_runs(self, reservations, client):
        """Who takes a waiting message for a running task keeps nothing; nor vice versa."""
        sent = self.send(reservations, "a")._replace(until="end", ttl=HOUR)
        before = client.ttls()
        reservations.keep([sent], runs=True, within=1.0)
        assert client.ttls() == before
        reservations.begin(sent)
        assert not reservations.confirm(sent)

    @pytest.mark.parametrize("until", ["start", "end"])
    @of_a_wrong_clock
    def test_a_task_ends_its_reservation_whatever_the_clock_says(
        self, reservations, advance, client, until, ahead
    ):
        """Ids are compared, and no times: a clock that jumps keeps nobody's key."""
        sent = self.send(reservations, "a")._replace(until=until)
        advance(ahead)
        reservations.begin(sent)
        if until == "end":
            assert reserved_for(client.client(decode_responses=True)) == "a"
            assert reservations.end(sent)
        assert reserved_for(client.client(decode_responses=True)) is None

    def test_a_clock_that_goes_forward_ends_a_reservation(self, reservations, advance, client):
        """A second message is sent, and the first ends nothing of its reservation."""
        first = self.send(reservations, "a")
        advance(HOUR)
        assert reserved_for(client.client(decode_responses=True)) is None
        self.send(reservations, "b")
        for until in ("start", "end"):
            reservations.begin(first._replace(until=until))
        assert not reservations.end(first)
        assert reserved_for(client.client(decode_responses=True)) == "b"

    def test_a_clock_that_goes_forward_by_hours_forgets_a_replacement(
        self, reservations, advance, client
    ):
        """What was replaced runs as well, and leaves the key to the newer message."""
        older = self.send(reservations, "a", replaces=True)
        self.send(reservations, "b", replaces=True)
        advance(3 * HOUR)
        self.send(reservations, "c", replaces=True)
        reservations.begin(older)
        assert reserved_for(client.client(decode_responses=True)) == "c"

    def test_a_burst_is_never_older_than_the_clock(self, reservations, advance):
        """Else a debounce would be postponed for an hour beyond lock_replace_for."""
        self.burst(reservations, "a")
        advance(20)
        assert self.burst(reservations, "b") == pytest.approx(20, abs=1)
        advance(-HOUR)
        assert self.burst(reservations, "c") == 0
        advance(30)
        assert self.burst(reservations, "d") == pytest.approx(30, abs=1)

    def test_a_burst_ends_when_the_clock_goes_forward(self, reservations, advance):
        """The newest message is not postponed any more."""
        self.send(reservations, "a", replaces=True, ttl=2 * HOUR)  # as with a countdown
        advance(HOUR)
        assert self.burst(reservations, "b") >= HOUR

    @pytest.mark.parametrize("when", ["before it is confirmed", "after it is confirmed"])
    @of_a_wrong_clock
    def test_what_was_replaced_does_not_run(self, reservations, advance, when, ahead):
        """Whatever the clock says, if the server still has what it was told."""
        older = self.send(reservations, "a")
        found = self.reserve(reservations, "b", ttl=2 * HOUR, replaces=True)
        if when == "before it is confirmed":
            advance(ahead)
        newer = Reservation(LOCK, "b", "start", 2 * HOUR, found.mark, found.number)
        reservations.confirm(newer)
        if when == "after it is confirmed":
            advance(ahead)
        with pytest.raises(Replaced):
            reservations.begin(older)
