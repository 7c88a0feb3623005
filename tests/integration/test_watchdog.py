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


def watchdog_threads():
    return [thread for thread in threading.enumerate() if thread.name == "dislock-watchdog"]


class TestKeeping:
    def test_a_lease_outlives_its_timeout_by_far(self, holding, others, redis_client):
        """A lease is held through three timeouts and more, and nobody else gets the lock."""
        lease = holding.take(KEY, 1.5)
        first = redis_client.hget(name_of(KEY), lease.owner).split(" ")[1]
        while lease.renewals < 10:
            assert lease.held, lease
            assert isinstance(others.try_take(KEY), Conflict)
            time.sleep(0.02)
        last = redis_client.hget(name_of(KEY), lease.owner).split(" ")[1]
        assert int(last) - int(first) > 3 * 1500
        assert holding.named("lock_lost") == []

    def test_many_leases_are_renewed_together(self, holding, redis_client):
        """300 leases are renewed in few round trips, by one thread, and all stay held."""
        before = set(watchdog_threads())
        leases = [holding.take(f"export:{number}", 6.0) for number in range(300)]
        redis_client.config_resetstat()
        wait_for(lambda: all(lease.renewals >= 2 for lease in leases), "the second renewals")
        reads = redis_client.info("stats")["total_reads_processed"]
        renewals = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert renewals >= 2 * len(leases) - 10
        assert reads < renewals / 5
        assert len(set(watchdog_threads()) - before) == 1
        assert all(lease.held for lease in leases)
        assert holding.named("lock_lost") == []

    def test_renewals_go_on_after_the_connections_were_killed(self, holding, redis_client):
        """CLIENT KILL costs no lease: the watchdog connects again."""
        lease = holding.take(KEY, 3.0)
        holding.wait_renewed(lease)
        redis_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        holding.wait_renewed(lease, 2)
        assert holding.named("lock_lost") == []


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


class TestReports:
    def test_nothing_is_told_of_a_lease_after_its_release(self, holding, redis_client):
        """A lease released while another's loss is being reported is released, and not lost."""
        gate, inside = threading.Event(), threading.Event()

        def slow(lease, action):
            inside.set()
            if threading.current_thread() is not threading.main_thread():  # which may be too late
                gate.wait(PATIENCE)

        leases = [holding.take(f"export:{number}", 1.2) for number in range(20)]
        for lease in leases:
            lease.on_end = slow
        redis_client.delete(*(lease.driver.names[0] for lease in leases))
        assert inside.wait(PATIENCE)
        for lease in leases:
            lease.release()
        gate.set()
        marker = holding.take("marker", 0.9)
        holding.wait_renewed(marker)
        for lease in leases:
            ends = [
                event.name
                for event in holding.events
                if event.lease is lease and event.name in {"lock_lost", "lock_released"}
            ]
            assert len(ends) == 1, (lease, ends)


def take_over(holding, redis_client, key=KEY):
    """Take a lock away from its holder, as an operator's DEL and the next task do."""
    redis_client.delete(name_of(key))
    return holding.take(key, LONG)


class TestSignals:
    def test_the_life_of_a_lease(self, holding):
        """Acquired, renewed, released: in that order, with the documented arguments, and held."""
        lease = holding.take(KEY, 1.5)
        holding.wait_renewed(lease)
        lease.release()
        names = [event.name for event in holding.events]
        assert names == ["lock_acquired", *["lock_renewed"] * (len(names) - 2), "lock_released"]
        assert len(names) >= 3
        assert [event.arguments for event in holding.events[:-1]] == [{"lease": lease}] * (
            len(names) - 1
        )
        assert holding.events[-1].arguments == {"lease": lease, "expiring": False}
        assert [event.held for event in holding.events] == [True] * (len(names) - 1) + [False]


class TestLosing:
    def test_a_lock_that_was_taken_over_is_lost(self, holding, others, redis_client):
        """The old holder is told; the new one keeps its lease, and has the greater token."""
        lease = holding.take(KEY, 1.5)
        new = take_over(others, redis_client)
        before = redis_client.hgetall(name_of(KEY))
        holding.wait_lost(lease)
        assert redis_client.hgetall(name_of(KEY)) == before
        assert new.held
        assert new.token > lease.token
        assert others.named("lock_lost") == []
