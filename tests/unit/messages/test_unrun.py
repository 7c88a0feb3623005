"""A task that is sent again for later: when, and with what."""

from __future__ import annotations

import pytest
from celery.app.task import Context
from celery.exceptions import Reject, Retry

from celery_dislock import SingletonTask
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import PUT_OFF_HEADER, Notes
from celery_dislock.messages.unrun import PUT_OFF_FIRST, PUT_OFF_MOST, put_off


@pytest.fixture
def request_():
    """Celery's, which Celery keeps."""
    return Context({"id": "1", "task": "t", "retries": 2, "args": (), "headers": {}})


@pytest.fixture
def delivery(app, world, request_):
    @app.task(base=SingletonTask, lock_key="k")
    def task(): ...

    return Delivery(app.tasks[task.name], request_, world.lock(), None, Notes())


def delay(delivery, **terms):
    """Put the delivery off; return after how many seconds it comes again."""
    with pytest.raises(Retry) as ended:
        put_off(delivery, "held", error=ValueError(), **terms)
    return ended.value.when


def test_it_comes_again_under_its_own_id_with_its_retries_unspent(delivery, broker):
    """The wait for a lock is none of the task's own retries."""
    delay(delivery)
    [sent] = broker.sent
    assert (sent["task_id"], sent["retries"]) == ("1", 2)


def test_the_pauses_grow_to_a_minute(delivery, broker):
    """A second, two, four, and so on, give or take a quarter."""
    pauses = [delay(delivery) for _ in range(10)]
    for nth, pause in enumerate(pauses):
        wanted = min(PUT_OFF_FIRST * 2**nth, PUT_OFF_MOST)
        assert 0.74 * wanted < pause < 1.26 * wanted
    assert broker.sent[-1]["headers"][PUT_OFF_HEADER] == 10


def test_it_comes_no_later_than_the_reason_is_gone(delivery, broker):
    """The holder's lease bounds the pause, but for the first second."""
    delivery.notes.put_off = 10
    assert delay(delivery, at_most=5.0) < 6.3
    assert delay(delivery, at_most=0.1) < 1.3


def test_with_the_broker_away_a_late_acknowledged_one_is_given_back(delivery, broker):
    """The broker has the message still, and delivers it again."""
    broker.times_away = 1
    delivery.task.acks_late = True
    with pytest.raises(Reject) as rejected:
        put_off(delivery, "held")
    assert rejected.value.requeue is True
