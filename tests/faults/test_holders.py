"""The process that holds a lock is frozen or killed."""

from __future__ import annotations

import random
import re
import time

import pytest

from celery_dislock.locks.attempt import Conflict
from celery_dislock.locks.lease import Lease
from tests.faults.history import read, violations
from tests.holding import name_of, wait_for

pytestmark = pytest.mark.faults

KEY = "export:7"


def take_when_free(others, timeout=60.0) -> Lease:
    return wait_for(
        lambda: isinstance(got := others.try_take(KEY, timeout), Lease) and got, "the free lock"
    )


class TestStopped:
    def test_longer_than_its_lease(self, start_holder, redis_url, redis_server, others):
        """Another takes the lock; the stalled owner is told when it goes on, changing nothing."""
        holder = start_holder("hold", redis_url, KEY, 1.0)
        token = holder.wait_for("acquired")["token"]
        holder.wait_for("lock_renewed")
        holder.stop()
        new = take_when_free(others)
        assert new.token > token
        with redis_server.client() as client:
            before = client.hgetall(name_of(KEY))
            holder.go_on()
            assert holder.wait_for("lock_lost")["held"] is False
            holder.wait_for("held no more")
            assert holder.finish() == 0
            assert client.hgetall(name_of(KEY)) == before
        assert len(holder.all("lock_lost")) == 1
        assert holder.all("lock_released") == []
        assert new.held
        assert others.named("lock_lost") == []

    def test_shorter_than_its_lease(self, start_holder, redis_url, others):
        """A holder that was frozen for less than its lease keeps it, and nobody is told a thing."""
        holder = start_holder("hold", redis_url, KEY, 6.0)
        holder.wait_for("acquired")
        holder.stop()
        time.sleep(0.5)
        assert isinstance(others.try_take(KEY), Conflict)
        holder.go_on()
        wait_for(lambda: len(holder.all("lock_renewed")) >= 2, "renewals")
        assert isinstance(others.try_take(KEY), Conflict)
        assert holder.all("held no more") == []
        assert holder.finish() == 0
        assert holder.all("lock_lost") == []
        others.take(KEY)


class TestKilled:
    def test_its_lock_frees_itself(self, start_holder, redis_url, redis_server, others):
        """After SIGKILL the lock stays taken until the lease ends; then it is free."""
        holder = start_holder("hold", redis_url, KEY, 2.0)
        token = holder.wait_for("acquired")["token"]
        holder.wait_for("lock_renewed")
        holder.kill()
        with redis_server.client() as client:
            assert 0 < client.pttl(name_of(KEY)) <= 2000
        assert isinstance(others.try_take(KEY), Conflict)
        assert take_when_free(others).token > token

    def test_its_lock_is_free_at_once_for_who_knows(self, start_holder, redis_url, others):
        """Who has seen the process end releases its lease by the start of its owner's name."""
        holder = start_holder("hold", redis_url, KEY, 60.0)
        owner = holder.wait_for("acquired")["owner"]
        holder.kill()
        assert others.store.release_dead([name_of(KEY)], owner.rpartition("/")[0] + "/") == 1
        others.take(KEY)


class TestContention:
    """Four processes contend for two locks while some are frozen and killed at random."""

    TIMEOUT = 0.6  # seconds

    @pytest.mark.slow
    def test_a_while(self, start_holder, redis_url, redis_server, tmp_path):
        """In twelve seconds of it no lock has two holders at any instant, and all tokens grow."""
        journal, seconds = tmp_path / "journal", 12

        def start():
            process = start_holder("contend", redis_url, journal, self.TIMEOUT, *keys)
            process.wait_for("ready")
            return process

        def holder_of(key):
            """The process that holds the lock; any where none does."""
            pids = [int(pid) for lease in client.hvals(name_of(key)) for pid in find_pid(lease)]
            holding = [process for process in processes if process.pid in pids]
            return random.choice(holding or processes)

        find_pid = re.compile(r'"pid":(\d+)').findall
        keys = ["export:1", "export:2"]
        processes = [start() for _ in range(4)]
        ends_at = time.monotonic() + seconds
        with redis_server.client(decode_responses=True) as client:
            while time.monotonic() < ends_at:
                process = holder_of(random.choice(keys))
                process.stop()
                if random.random() < 0.2:
                    process.kill()
                    processes[processes.index(process)] = start()
                else:
                    time.sleep(random.choice((0.02, 1.5 * self.TIMEOUT)))
                    process.go_on()
            assert [process.finish() for process in processes] == [0] * len(processes)

            intervals = read(journal)
            assert violations(intervals) == []
            assert {interval.key for interval in intervals} == set(keys)
            assert len({interval.holder for interval in intervals}) >= 3
            assert len(intervals) >= 2 * seconds, "hardly any contention: this proved nothing"
            wait_for(lambda: not client.keys("*"), "the expiry of what killed processes held")
