"""How leases end, also when the server does not answer; time is the test's."""

from functools import partial

import pytest
from celery import Celery

import tests.declaring
from celery_dislock import Dislock, LockLostError, scripts
from celery_dislock.servers.store import Store
from proof.proxy import Proxy, cut, lose_reply, runs
from tests.holding import name_of, wait_for


def names(heard):
    return [name for name, _ in heard]


def ended(driven):
    """Return how many releases came, those of the watchdog as well."""
    return driven.asked(scripts.RELEASE)


def test_a_released_lease_is_held_no_more(driven, heard):
    """Release ends trust at once, and says so once, however often it is called; one round trip."""
    lease = driven.take()
    driven.proxy.commands.clear()
    lease.release()
    lease.release()
    assert lease.held is False
    assert lease.remaining == 0
    assert len(driven.proxy.commands) == 1
    assert names(heard) == ["lock_acquired", "lock_released"]
    with pytest.raises(LockLostError, match="released"):
        lease.ensure_held()
    assert driven.client.keys("dislock:{k}*") == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_release_that_was_cut_short_is_a_release(driven, heard, when):
    """Before it was sent or after: it was released, and not lost."""
    lease = driven.take()
    fault = cut if when == "before" else lose_reply
    driven.fault(scripts.RELEASE, fault, times=1)
    lease.release()
    lease.release()
    driven.advance(2)
    driven.assert_free("k")
    assert names(heard) == ["lock_acquired", "lock_released"]


def test_a_release_that_an_exception_interrupts_happens_soon(driven, monkeypatch):
    """A signal handler may raise it before anything is sent, and nobody may repeat the call."""

    def strike(*_):
        raise KeyboardInterrupt

    lease = driven.take()
    with monkeypatch.context() as struck, pytest.raises(KeyboardInterrupt):
        struck.setattr(Store, "release", strike)
        lease.release()
    driven.assert_locked("k")
    driven.advance(1.1)
    driven.assert_free("k")


@pytest.mark.parametrize("gone", ["deleted", "late", "on its way"])
def test_a_lease_that_is_gone_at_its_release_was_lost(driven, heard, gone):
    """Trusted or not: somebody else has ended it, but if it expires while its release is sent."""
    lease = driven.take()
    if gone == "deleted":
        driven.client.delete(name_of("k"))
    elif gone == "late":
        driven.stall(40)
    else:  # a hub that computes, or a connection that is made anew: the body has ended before
        driven.fault(scripts.RELEASE, lambda: driven.stall(40), times=1)
    lease.release()
    assert lease.lost is (gone != "on its way")
    assert names(heard) == ["lock_acquired", "lock_lost" if lease.lost else "lock_released"]


@pytest.mark.parametrize("held", [True, False])
def test_closing_tells_of_locks_that_are_still_held(driven, caplog, held):
    """They end with their expiry, or when they are released, which is possible as before."""
    dislock = driven.beside()
    lease = dislock.lock("k").try_acquire()
    if not held:
        lease.release()
    dislock.close()
    assert ("Closed while this process held 1 lock(s)" in caplog.text) is held
    lease.release()
    driven.assert_free("k")


def test_a_release_touches_no_other_owner(driven):
    """A lost lease's release leaves the new holder alone."""
    lease = driven.take()
    driven.stall(40)
    with driven.beside().lock("k") as new:
        lease.release()
        assert [one.token for one in driven.lock().holders()] == [new.token]


def test_a_release_that_failed_is_sent_again(driven, heard, caplog):
    """By the watchdog: whoever held the lock may hang since; the log says how long it may last."""
    lease = driven.take()
    with driven.outage():
        lease.release()
    driven.advance(2)
    driven.assert_free("k")
    assert "ends by itself within 30" in caplog.text
    assert names(heard) == ["lock_acquired", "lock_released"]


def test_the_watchdog_sends_it_though_nothing_else_keeps_it_awake(redis_server, redis_client):
    """It sleeps for good where there is no lease to renew, and is woken."""
    with Proxy(redis_server.port) as proxy, Dislock.from_url(proxy.url) as dislock:
        proxy.fault(runs(scripts.RELEASE), "-ERR not now")
        dislock.lock("k").try_acquire().release()
        wait_for(lambda: not redis_client.exists(name_of("k")), "the release")


def test_what_waits_is_sent_when_locks_are_closed(driven):
    """A program that is interrupted closes its locks soon after."""
    dislock = Dislock.from_url(driven.url)
    driven.fault(scripts.RELEASE, "-ERR not now", times=1)
    dislock.lock("k").try_acquire().release()
    dislock.close()
    driven.assert_free("k")


def test_what_cannot_be_released_is_not_tried_for_ever(driven):
    """After the time of a place in line all of it has run out by itself."""
    driven.fault(scripts.RELEASE, "-ERR not now")
    driven.take().release()
    driven.advance(95)
    tried = ended(driven)
    driven.advance(100)
    assert ended(driven) == tried > 50


def test_a_long_lease_is_tried_to_be_released_until_it_has_ended(driven):
    """The main process of a worker may renew it until then."""
    lease = driven.take(watchdog_timeout=270)
    driven.fault(scripts.RELEASE, "-ERR not now")
    lease.release()
    driven.advance(180)
    driven.proxy.forget_faults()
    driven.advance(2)
    driven.assert_free("k")


def test_what_the_server_refuses_to_release_is_tried_again(driven):
    """An error of one node, or of a full server, is no answer; the others are done with."""
    refused, gone = driven.take("refused"), driven.take("gone")
    driven.fault(scripts.RELEASE, "-OOM no memory", about="{refused}")
    driven.fault(scripts.RELEASE, "-OOM no memory", about="{gone}", times=1)
    for lease in (refused, gone):
        lease.release()
    driven.advance(3)
    driven.assert_free("gone")
    driven.assert_locked("refused")
    driven.proxy.forget_faults()
    tried = driven.asked(scripts.RELEASE, "{gone}")
    driven.advance(3)
    driven.assert_free("refused")
    assert driven.asked(scripts.RELEASE, "{gone}") == tried == 2
    tried = ended(driven)
    driven.advance(100)
    assert ended(driven) == tried


def test_a_lock_that_is_damaged_is_not_released_for_ever(driven):
    """It stays damaged; its own tasks say so."""
    lease = driven.take()
    driven.client.delete(name_of("k"))
    driven.client.set(name_of("k"), "damaged")
    lease.release()
    driven.advance(3)
    tried = ended(driven)
    driven.advance(100)
    assert ended(driven) == tried
    driven.client.delete(name_of("k"))


@pytest.fixture
def app(driven):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = "releases"  # other tests have this broker, too
    Dislock(app)
    driven.use(app)
    return app


@pytest.fixture
def declare(app):
    """Declare a task with the lock, whose body does this."""
    return partial(tests.declaring.declare, app)


def test_an_end_after_a_minimum_is_sent_again_as_it_was(driven, declare):
    """What was to last longer lasts as long, counted from its acquisition."""

    def body():
        driven.advance(20)
        driven.fault(scripts.RELEASE, "-ERR not now", times=1)

    task = declare(body, lock_at_least_for=60)
    task.apply(throw=True)
    driven.advance(2)
    [left] = driven.lock().holders()
    assert left.expiring
    driven.advance(37.9)
    driven.assert_locked("k")
    driven.advance(0.2)
    driven.assert_free("k")


@pytest.mark.parametrize(
    ("strategy", "ends"), [("skip", "success"), ("wait", "success"), ("skip", "failure")]
)
def test_a_lease_that_is_left_ends_a_timeout_after_its_last_renewal(
    driven, declare, heard, strategy, ends
):
    """It is marked, and nobody renews it; also one that was handed over for some seconds only."""

    def body():
        assert ends == "success"

    task = declare(body, lock_on_conflict=strategy, **{f"release_on_{ends}": False})
    if strategy == "wait":
        first = driven.take()
        task.delay()
        with driven.waiting(driven.run_parked):
            first.release()
    else:
        task.apply(throw=False)
    renewed = driven.asked(scripts.RENEW)
    assert True in [told["expiring"] for name, told in heard if name == "lock_released"]
    [left] = driven.lock().holders()
    assert left.expiring
    driven.advance(29.9)
    driven.assert_locked("k")
    driven.advance(0.2)
    driven.assert_free("k")
    assert driven.asked(scripts.RENEW) == renewed


def test_the_ticket_of_a_task_that_is_done_is_ended_after_any_outage(driven, declare):
    """Nothing else ends it for days, and a copy of the task would run."""
    task = declare(lambda: driven.fault(scripts.RELEASE, "-ERR not now"), lock_on_conflict="queue")
    with driven.hold("k"):
        sent = task.delay()
        assert driven.run_parked() == 1
    assert driven.run_parked() == 1
    assert sent.state == "SUCCESS"
    driven.advance(100)
    assert driven.client.exists("dislock:{k}:running")
    driven.proxy.forget_faults()
    driven.advance(2)
    assert not driven.client.exists("dislock:{k}:running")
    assert len(driven.client.keys("dislock:{k}:done:*")) == 1


def test_a_key_of_a_task_that_is_done_is_free_after_an_outage(driven, declare):
    """Messages would be dropped until its time is over."""
    task = declare(
        lambda: driven.fault(scripts.RELEASE_UNIQUE, "-ERR not now", times=1),
        lock_unique_until="end",
    )
    task.delay()
    assert driven.run_parked() == 1
    assert driven.client.exists("dislock:{k}:unique")
    driven.advance(2)
    assert not driven.client.exists("dislock:{k}:unique")
