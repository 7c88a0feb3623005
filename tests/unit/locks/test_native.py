"""What threads and greenlets share, as it is where no greenlets are; see tests/integration too."""

from __future__ import annotations

import threading

from celery_dislock.locks.native import Bell, Thread

LIMIT = 30.0  # seconds


def test_a_ring_is_kept_for_who_waits_later():
    """A bell that rang before is heard at once, once."""
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait(None)
    bell.wait(0.0)  # silent again: returns because its time is over


def test_a_thread_runs_its_function_under_its_name():
    """It shows in the list of threads, and does not keep the process alive."""
    seen, go_on = [], Bell()

    def run():
        seen.append(threading.current_thread())
        go_on.wait(LIMIT)

    thread = Thread(run, "dislock-watchdog")
    assert thread.is_alive()
    assert not thread.is_current()
    go_on.ring()
    thread.join(LIMIT)
    assert not thread.is_alive()
    thread.join(LIMIT)
    [here] = seen
    assert here.name == "dislock-watchdog"
    assert here.daemon


def test_a_function_that_raises_ends_its_thread(monkeypatch):
    """Nobody waits for a thread that died."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread = Thread(lambda: 1 / 0, "t")
    thread.join(LIMIT)
    assert not thread.is_alive()
