"""Leases that a watchdog keeps: renewed, released, lost, and what is told of them."""

from __future__ import annotations

import threading
import time

import pytest

from celery_dislock import signals
from celery_dislock.locks.attempt import Conflict
from tests.holding import PATIENCE, Holding, name_of, wait_for

LONG = 60.0  # seconds: no lease of these tests runs out by itself
KEY = "export:7"


@pytest.fixture
def holding(redis_url):
    with Holding(redis_url) as holding:
        yield holding


@pytest.fixture
def others(redis_url):
    """Another process's locks on the same server."""
    with Holding(redis_url) as others:
        yield others


@pytest.fixture
def receive(holding):
    """Connect a receiver to one signal of these locks, for the time of the test."""
    connected = []

    def connect(name, receiver):
        signal = getattr(signals, name)
        signal.connect(receiver, sender=holding.sender, weak=False)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver, sender=holding.sender)


class TestKeeping:
    def test_a_lease_outlives_its_timeout_by_far(self, holding, others, redis_client):
        """A lease is held through three timeouts and more, and nobody else gets the lock."""
        lease = holding.take(KEY, 1.5)
        first = redis_client.hget(name_of(KEY), lease.owner).split(" ")[1]

        def renewed():
            assert lease.held, lease
            assert isinstance(others.try_take(KEY), Conflict)
            return lease.renewals >= 10

        wait_for(renewed)
        last = redis_client.hget(name_of(KEY), lease.owner).split(" ")[1]
        assert int(last) - int(first) > 3 * 1500
        assert holding.named("lock_lost") == []

    def test_renewals_go_on_after_the_connections_were_killed(self, holding, redis_client):
        """CLIENT KILL costs no lease: the watchdog connects again."""
        lease = holding.take(KEY, 3.0)
        holding.wait_renewed(lease)
        redis_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        holding.wait_renewed(lease, 2)
        assert holding.named("lock_lost") == []


@pytest.mark.parametrize("where", ["in a round trip", "elsewhere"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_unexpected_error_ends_no_lease(holding, monkeypatch, caplog, where, error):
    """It is logged and counted, and the step is done again."""
    lease, raised = holding.take(KEY, LONG / 20), []

    def fails(*_args, **_within):
        raised.append(error)
        raise error

    with monkeypatch.context() as patch:
        if where == "elsewhere":
            patch.setattr(lease, "caller_ended", fails)
        else:
            patch.setattr(holding.store, "renew", fails)
        wait_for(lambda: len(raised) > 1, "another try")
    holding.wait_renewed(lease, 2)
    assert holding.watchdog.errors >= 2
    assert "the watchdog goes on" in caplog.text
    # What a round trip raises is an outage, which delays no other lease.
    assert ("Cannot renew" in caplog.text) is (where == "in a round trip")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_next_lease_starts_the_thread_again(holding, receive):
    """If what a receiver raises has ended the thread, all leases are renewed from then on."""
    ended = []

    def end(**_):
        if not ended:
            ended.append(threading.current_thread())
            raise KeyboardInterrupt

    receive("lock_renewed", end)
    first = holding.take("first", LONG / 20)
    wait_for(lambda: ended and not ended[0].is_alive(), "the end of the thread")
    second = holding.take("second", LONG)
    holding.wait_renewed(first, 2)
    assert second.held


class TestBlockedWatchdog:
    """A receiver that never returns blocks the one thread: trust must end all the same."""

    @pytest.fixture
    def block(self, receive):
        gate, inside = threading.Event(), threading.Event()

        def bad(**kwargs):
            inside.set()
            gate.wait(PATIENCE)

        receive("lock_renewed", bad)
        yield inside, gate
        gate.set()

    def test_held_turns_false_at_the_deadline(self, holding, block):
        """With the watchdog blocked a lease is held until its local deadline, and then no more."""
        inside, gate = block
        lease = holding.take(KEY, 1.2)
        assert inside.wait(PATIENCE)
        while True:
            before, held, after = time.monotonic(), lease.held, time.monotonic()
            if after < lease.trusted_until:
                assert held
            if before >= lease.trusted_until:
                assert not held
                break
        assert lease.remaining == 0
        with pytest.raises(Exception, match="its time ran out"):
            lease.ensure_held()
        gate.set()
        event = holding.wait_lost(lease)
        assert "could not be renewed in time" in event.arguments["reason"]
        lease.release()
        assert len(holding.named("lock_lost", lease)) == 1
        assert holding.named("lock_released") == []
