"""Other libraries are used as their documentation says, and their histories are counted rightly."""

import threading
import time

import pytest

from proof.peering import LOCKS, Lost, Refused
from proof.peers import OF_LOCKS, OF_TASKS, cells_of, judge_locks, judge_tasks, shown, went_on
from proof.site import Site
from tests.faults.test_checker import element, file, hold, operation, task
from tests.pace import LEASE

TIMEOUT = LEASE


@pytest.fixture(params=LOCKS)
def take(request, redis_url):
    """What takes a library's lock."""
    terms = {"options": {}, "has_lines": True, "broker": "", "results": ""}
    site = Site(url=redis_url, folder="", seed=1, timeout=TIMEOUT, **terms)
    return LOCKS[request.param](site)


def refuses(take):
    """Return whether another thread is refused the lock."""
    refused = []

    def ask():
        try:
            with take("k", 0):
                pass
        except Refused:
            refused.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return bool(refused)


def test_a_lock_that_is_kept_outlives_its_timeout(take):
    """Library or body renew it: it is held, and refused to others, until its end."""
    with take("k", 0) as grip:
        until = time.monotonic() + 1.5 * TIMEOUT
        while time.monotonic() < until:
            grip.keep()
            time.sleep(TIMEOUT / 10)
        assert grip.asks()
        assert refuses(take)
    assert not refuses(take)


def test_a_lock_that_was_deleted_is_lost(take, redis_client):
    """Each library says so at the release, if not before."""
    with pytest.raises(Lost), take("k", 0) as grip:
        redis_client.flushall()
        until = time.monotonic() + 3 * TIMEOUT
        while grip.asks():
            assert time.monotonic() < until
            time.sleep(TIMEOUT / 10)


def test_violations_of_locks_are_counted_by_use():
    """Holds, writes and refusals, each with how many there were."""
    plain = hold("a", 1, 4, key="plain:k", token=1) + hold("b", 3, 5, key="plain:k", token=2)
    asked = hold("c", 1, 2, key="asked:k", token=1) + hold("d", 3, 4, key="asked:k", token=2)
    events = [*plain, *asked, *operation("e", 6, 7, outcome="refused")]
    events += [*element("lost", "plain"), *element("kept", "plain"), *file("kept")]
    assert cells_of(judge_locks(sorted(events)), OF_LOCKS) == [
        *("500.0 (1 of 2)", "0.0 (0 of 2)"),
        *("500.0 (1 of 2)", "-", "-"),
        "1000.0 (1 of 1)",
    ]


def test_how_long_a_plain_body_goes_on_is_measured():
    """From the first sign of life after another was granted the lock; not while it was stopped."""
    believes = hold("a", 1, 9, key="plain:k", token=1)  # trusts at 5, and at its end
    other = hold("b", 3, 4, key="plain:k", token=2)
    assert went_on(sorted(believes + other)) == 4
    assert went_on(sorted(believes)) == 0


def test_violations_of_tasks_are_counted():
    """A task that never ran is lost, unless its outcome says that it did not run."""
    late = {"key": "late:k"}
    events = [
        *task("ran", "sent", "begin", "end", "outcome", **late),
        *task("lost", "sent", **late),
        *task("skipped without a word", "sent", "outcome", **late),
        *task("failed", "sent", "begin", "outcome", state="FAILURE", **late),
        *task("died", "sent", key="early:k"),
        *hold("a", 1, 4, token=1),
        *hold("b", 3, 5, token=2),
    ]
    cells = cells_of(judge_tasks(sorted(events)), OF_TASKS)
    assert cells == ["200.0 (1 of 5)", "500.0 (2 of 4)", "0.0 (0 of 4)", "0.0 (0 of 1)"]


def test_a_key_that_does_not_expire_is_left_for_ever():
    """Other times are seconds."""
    assert [shown(0.0), shown(3600.0), shown(float("inf"))] == ["-", "3,600.000 s", "for ever"]
