"""The result of a message that was not sent: it ends, with a result or with the reason for none."""

import copy
import pickle
from functools import partial

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from greenlet import getcurrent, greenlet

from celery_dislock import NoResultError
from tests.declaring import declare
from tests.unit.deliveries import deliver


class Site:
    """A task whose message is there, its worker, and the result that another sender gets."""

    def __init__(self, app, lock_server, broker):
        self.app, self.lock_server, self.broker = app, lock_server, broker
        self.stays = False
        self.error = None

    def send(self, *, wanted=True, until="end", **options):
        def body():
            return self.body()

        self.task = declare(self.app, body, lock_unique_until=until, **options)
        self.task.apply_async(task_id="a", ignore_result=not wanted)
        self.result = self.task.delay()
        assert (self.result.id, self.result.duplicate) == ("a", True)
        return self.result

    def body(self):
        if self.stays:
            getcurrent().parent.switch()
        if self.error is not None:
            raise self.error
        return 7

    def run(self):
        """Let a worker run the task."""
        return deliver(self.task, "a", headers=self.broker.last.headers)

    def begin(self):
        """Let a worker begin to run it; return what lets it go on."""
        self.stays = True
        worker = greenlet(self.run)
        worker.switch()
        return worker.switch

    def seconds_until_there_is_none(self):
        """Return the seconds until get() says that there is no result, and why."""
        began = self.lock_server.clock()
        with pytest.raises(NoResultError) as caught:
            self.result.get()
        assert (caught.value.key, caught.value.id) == ("k", "a")
        return self.lock_server.clock() - began, caught.value.reason


@pytest.fixture
def site(app, lock_server, broker):
    return Site(app, lock_server, broker)


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
@pytest.mark.parametrize("state", ["waiting", "running"])
@pytest.mark.parametrize("lock_key", ["k", ["k", "l"]])
def test_a_result_is_waited_for_while_its_task_is_there(site, lock_server, until, state, lock_key):
    """In the queue, or running: with a reservation that ended at its start, by its lock."""
    site.send(until=until, lock_key=lock_key)
    lock_server.after(300, site.run if state == "waiting" else site.begin())
    began = lock_server.clock()
    assert site.result.get() == 7
    assert lock_server.clock() - began == pytest.approx(300, abs=1)


def test_a_lock_server_that_stays_away_is_the_reason(site, lock_server):
    """Nobody waits for ever."""
    site.send(lock_unique_for=200)
    lock_server.away = True
    waited, reason = site.seconds_until_there_is_none()
    assert waited == pytest.approx(200, abs=5)
    assert reason == "lock server redis://driven: away"


@pytest.mark.parametrize("key", ["free", "another's", "over"])
def test_of_a_task_of_which_nothing_is_known_no_result_is_expected(site, lock_server, key):
    """It was killed, purged, or its result has expired: after the time in which one is stored."""
    site.send(**({"lock_unique_for": 3} if key == "over" else {}))
    if key != "over":
        lock_server.lose()
    if key == "another's":
        site.task.delay()
    waited, reason = site.seconds_until_there_is_none()
    assert 10 <= waited - (3 if key == "over" else 0) <= 14
    assert reason.startswith("its key is not reserved for it any more, ")


@pytest.mark.parametrize(
    ("state", "options", "patient"),
    [
        ("PARKED", {"until": "end"}, True),
        ("RETRY", {"until": "start"}, True),
        ("PENDING", {"until": "start", "lock_limit": None}, True),
        ("RETRY", {"until": "end"}, False),
        ("PENDING", {"until": "end", "lock_limit": None}, False),
    ],
)
def test_a_task_that_waits_unseen_has_more_time(site, lock_server, state, options, patient):
    """It is in line, waits for its next try, or holds no lock: as long as a message may wait.

    With "end" its reservation would be there between two tries, too.
    """
    site.send(lock_unique_for=100, **options)
    lock_server.lose()
    site.app.backend.store_result("a", None, state)
    waited, _ = site.seconds_until_there_is_none()
    assert 0 <= waited - (100 if patient else 10) <= 4


def test_a_task_that_is_seen_again_is_waited_for(site, lock_server):
    """A retry of it was between its two messages."""
    site.send()
    lock_server.lose()
    for when in (9, 60):
        lock_server.after(when, partial(site.task.apply_async, task_id="a", retries=1))
        lock_server.after(when + 45, lock_server.lose)
    lock_server.after(110, site.run)
    assert site.result.get() == 7


def test_a_task_that_has_ended_says_since_when(site, lock_server):
    """Its key stays reserved: "expiry"; its result has expired, or was not stored."""
    site.send(until="expiry")
    site.run()
    site.app.backend.forget("a")
    lock_server.advance(600)
    waited, reason = site.seconds_until_there_is_none()
    assert waited < 3
    assert reason == "its task has ended 602 s ago, and its result is not stored any more"


@pytest.mark.parametrize("until", ["end", "expiry"])
def test_a_task_that_has_just_ended_may_still_store_its_result(
    site, lock_server, monkeypatch, until
):
    """The lock is released before that."""
    site.send(until=until)
    later = partial(site.app.backend.store_result, "a", 7, "SUCCESS")
    monkeypatch.setattr(site.app.backend, "mark_as_done", lambda *_, **__: None)
    lock_server.after(5, later)
    site.run()
    assert site.result.get() == 7


def test_a_task_that_died_under_a_fixed_reservation_is_not_waited_for(site, lock_server):
    """Nobody renews "expiry", so the lock that it does not hold any more tells."""
    site.send(until="expiry")
    goes_on = site.begin()
    lock_server.send("DEL", "dislock:{k}")
    waited, _ = site.seconds_until_there_is_none()
    assert waited <= 14
    goes_on()


def test_a_first_whose_sender_wants_no_result_has_none(site):
    """The second is told at once, instead of waiting for what never comes."""
    site.send(wanted=False)
    waited, reason = site.seconds_until_there_is_none()
    assert waited < 0.1
    assert reason == "its sender has asked for none"


def test_a_task_s_own_error_is_raised(site, lock_server):
    """Also if it is the one by which waiting ends, and with the arguments of Celery's get()."""
    site.error = CeleryTimeoutError("of the task")
    site.send()
    lock_server.after(61, site.begin())
    with pytest.raises(CeleryTimeoutError, match="of the task"):
        site.result.get()
    assert isinstance(site.result.get(propagate=False), CeleryTimeoutError)


@pytest.mark.parametrize("seconds", [0.5, 5.0, 61.0])
def test_a_timeout_is_kept(site, lock_server, seconds):
    """It is no longer than asked for, although the lock server is asked now and then."""
    site.send()
    began = lock_server.clock()
    with pytest.raises(CeleryTimeoutError, match="timed out"):
        site.result.get(timeout=seconds, interval=0.1)
    assert seconds <= lock_server.clock() - began <= seconds + 0.2


def test_a_result_of_celery_s_is_one_still(site, app, lock_server):
    """Its class, its methods, and what was stored; it is marked, and can be pickled and copied."""
    result = site.send()
    site.run()
    asked = lock_server.requests
    assert isinstance(result, AsyncResult)
    assert (result, result.get(), result.duplicate) == (app.AsyncResult("a"), 7, True)
    assert lock_server.requests == asked  # a result that is there is returned at once
    assert app.AsyncResult("a").duplicate is False
    pickled = pickle.loads(pickle.dumps(result))
    assert isinstance(pickled, AsyncResult)
    assert pickled.id == "a"
    again = copy.copy(result)
    assert again.duplicate
    assert again.first is result.first


def test_a_task_that_waits_for_its_own_result_is_told_so(app, broker):
    """As in the body of a unique task that sends itself: the message that is there is its own."""
    task = declare(app, lambda: task.delay().get(), lock_unique_until="end")
    task.apply_async(task_id="a")
    error = deliver(task, "a", headers=broker.last.headers).retval.exception
    assert isinstance(error, NoResultError)
    assert "it is the task that asks" in str(error)
