"""Who hears what happens to locks, in which order, and what it costs if nobody wants to."""

import sys
from functools import partial
from unittest import mock

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask, signals
from celery_dislock.exceptions import LockLostError
from celery_dislock.locks import channel
from celery_dislock.operating import telemetry
from tests.holding import name_of

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


@pytest.mark.parametrize("what", ["lock", "task"])
def test_nothing_is_called_for_nobody(app, monkeypatch, what):
    """Taking and releasing a free lock enters no function that is there for those who watch."""

    @app.task(lock_key=KEY)
    def export(): ...

    monkeypatch.delitem(sys.modules, channel.TRACING, raising=False)
    for signal in (signals.lock_acquired, signals.lock_released):
        monkeypatch.setattr(signal, "receivers", [])  # an app of other tests may have some

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


def test_a_receiver_is_heard_from_then_on(app, receive):
    """Also by a lock that was made, and a lease that was taken, before it was connected."""
    heard = []

    def receiver(signal, sender, lease, **_about):
        heard.append((signal.name, sender, lease))

    lock = app.lock(KEY)
    with lock:
        pass
    lock.acquire()
    lease = lock.lease
    receive("lock_released", receiver)
    lock.release()
    assert heard == [("lock_released", lock, lease)]


def test_a_process_that_is_traced_later_tells_its_spans(app, monkeypatch):
    """An application may set OpenTelemetry up after its first task."""
    span = mock.Mock(is_recording=lambda: True)

    @app.task(lock_key=KEY)
    def export(): ...

    monkeypatch.delitem(sys.modules, channel.TRACING, raising=False)
    export.apply()
    monkeypatch.setitem(sys.modules, channel.TRACING, mock.Mock(get_current_span=lambda: span))
    export.apply()
    told = [call.args[0] for call in span.add_event.mock_calls]
    assert told == ["celery_dislock.acquired", "celery_dislock.released"]


def test_a_loss_is_told_after_the_body_was_stopped(app, redis_client, caplog, receive):
    """A receiver may take long.  It is told, even if the stop interrupts what tells it."""
    told = []

    def receiver(signal, **about):
        about.pop("sender")
        told.append((signal.name, sys.exc_info()[0], about))

    lock = app.lock(KEY, on_lost="raise")
    for name in ("lock_lost", "lock_released"):
        receive(name, receiver)
    with pytest.raises(LockLostError), lock as lease:
        redis_client.delete(name_of(KEY))
        lock.extend()  # finds the loss in the thread of the body
        pytest.fail("the body runs on")
    about = {"lease": lease, "reason": lease.why_ended}
    assert told == [("lock_lost", LockLostError, about)]
    assert f"Lock {KEY!r} of thread " in caplog.text
