"""Who hears what happens to locks, in which order, and what it costs if nobody wants to."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_dislock import Dislock, SingletonTask, current_lease, signals
from celery_dislock.exceptions import LockLostError
from celery_dislock.locks import channel
from celery_dislock.operating import telemetry
from tests.holding import Holding, name_of

KEY = "export:7"
WATCHING = {channel.__file__, telemetry.__file__}


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=redis_url)
    app.task = partial(app.task, base=SingletonTask, shared=False)
    dislock = Dislock(app)
    app.lock = dislock.lock
    yield app
    dislock.close()


@pytest.fixture
def holding(redis_url):
    with Holding(redis_url) as holding:
        yield holding


@contextmanager
def receiving(name, receiver, **sender):
    """Have a signal received."""
    signal = getattr(signals, name)
    signal.connect(receiver, weak=False, **sender)
    try:
        yield
    finally:
        signal.disconnect(receiver, **sender)


@pytest.fixture
def current(monkeypatch):
    """Have OpenTelemetry's API, as the package sees it, return this as the current span."""

    def use(get_current_span):
        module = SimpleNamespace(get_current_span=get_current_span)
        monkeypatch.setitem(sys.modules, channel.TRACING, module)

    monkeypatch.delitem(sys.modules, channel.TRACING, raising=False)
    return use


def span(events):
    """Make a span that records."""
    return SimpleNamespace(
        is_recording=lambda: True,
        set_attributes=lambda _attributes: None,
        add_event=lambda name, _about: events.append(name.removeprefix("celery_dislock.")),
    )


class TestNobody:
    """Most processes have no receiver, metrics or traces."""

    @pytest.mark.parametrize("what", ["lock", "task"])
    def test_nothing_is_called_for_watching(self, app, current, what):
        """Taking and releasing a free lock enters no function that is there for those who watch."""

        @app.task(lock_key=KEY)
        def export(): ...

        def use_lock():
            lock = app.lock(KEY)
            assert lock.acquire()
            lock.release()

        use = use_lock if what == "lock" else export.apply
        use()
        entered = set()

        def note(frame, _event, _arg):
            if frame.f_code.co_filename in WATCHING:
                entered.add(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            use()
        finally:
            sys.setprofile(None)
        assert entered == set()


class TestLate:
    """A process has locks before anybody watches."""

    def test_a_receiver_is_heard_from_then_on(self, app):
        """Also by a lock that was made, and a lease that was taken, before it was connected."""
        heard = []

        def receiver(signal, sender, lease, **_about):
            heard.append((signal.name, sender, lease))

        lock = app.lock(KEY)
        with lock:
            pass
        with receiving("lock_acquired", receiver):
            lock.acquire()
            lease = lock.lease
        with receiving("lock_released", receiver):
            lock.release()
        assert heard == [("lock_acquired", lock, lease), ("lock_released", lock, lease)]

    def test_a_process_that_is_traced_later_tells_its_spans(self, app, current):
        """An application may set OpenTelemetry up after its first task."""
        events = []

        @app.task(lock_key=KEY)
        def export(): ...

        export.apply()
        current(lambda: span(events))
        export.apply()
        assert events == ["acquired", "released"]


class TestDefects:
    """A defect of what watches is for the log, and not for the lock."""

    def test_a_defect_is_logged(self, app, current, caplog):
        """The task runs under its lock; an operator reads why a count or an event is missing."""

        def broken():
            raise ValueError("a defect")

        @app.task(lock_key=KEY)
        def export():
            return current_lease().held

        current(broken)
        with caplog.at_level(logging.ERROR):
            assert export.apply().get() is True
        assert "locks are not affected" in caplog.text

    @pytest.mark.parametrize("thrown", [SoftTimeLimitExceeded(), LockLostError("k", "gone")])
    def test_what_is_thrown_into_the_task_meanwhile_is_not_swallowed(self, app, current, thrown):
        """It is for the task, and no defect."""

        def interrupted():
            raise thrown

        @app.task(lock_key=KEY)
        def export(): ...

        current(interrupted)
        assert type(export.apply().result) is type(thrown)

    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_a_receiver_that_raises_costs_no_lease(self, holding, error):
        """A bug in a user's receiver stops neither the watchdog nor the renewals."""

        def receiver(**_about):
            raise error

        with receiving("lock_renewed", receiver, sender=holding.sender):
            lease = holding.take(KEY, 1.5)
            holding.wait_renewed(lease, 2)
        assert lease.held


class TestEnds:
    """A lease that ends under its body."""

    @pytest.mark.parametrize("action", ["raise", "terminate"])
    def test_a_loss_is_told_after_the_body_was_stopped(self, holding, redis_client, caplog, action):
        """A receiver may take long, and the body must not run on meanwhile."""
        lease = holding.take(KEY, lock_on_lost=action)
        told = []
        lease.on_end = lambda of, do: told.append((of, do, holding.named("lock_lost")))
        redis_client.delete(name_of(KEY))
        with caplog.at_level(logging.ERROR):
            assert lease.driver.renew(lease) is False
        assert told == [(lease, action, [])]
        (event,) = holding.named("lock_lost")
        assert event.arguments == {"lease": lease, "reason": lease.why_ended}
        assert f"Lock {KEY!r} of tests.hold[" in caplog.text
        lease.release()
        assert len(holding.named("lock_lost")) == 1
        assert holding.named("lock_released") == []

    def test_what_stops_the_body_here_comes_after_the_signal(self, holding, redis_client):
        """The loss may be noticed in the body's own thread, in which the stop raises its error."""
        lease = holding.take(KEY, lock_on_lost="raise")

        def stop(_lease, _action):
            raise LockLostError(KEY, "gone")

        lease.on_end = stop
        redis_client.delete(name_of(KEY))
        with pytest.raises(LockLostError):
            lease.driver.renew(lease)
        assert len(holding.named("lock_lost")) == 1
