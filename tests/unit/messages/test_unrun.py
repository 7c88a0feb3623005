"""A task that is sent again for later: when, and with what."""

from __future__ import annotations

import pytest
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import SingletonTask, StoreError
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import Notes
from celery_dislock.messages.message import AS_IT_CAME
from celery_dislock.messages.unrun import put_off
from celery_dislock.servers.reservations import Reservation


@pytest.fixture
def request_():
    """Celery's, which Celery keeps."""
    kept = ({"id": "1", "task": "t", "retries": 2}, "application/json", "utf-8", b"[[], {}, {}]")
    info = {"exchange": "", "routing_key": "celery", AS_IT_CAME: kept}
    return Context({"id": "1", "task": "t", "retries": 2, "args": (), "delivery_info": info})


@pytest.fixture
def delivery(app, world, request_):
    @app.task(base=SingletonTask, lock_key="k")
    def task(): ...

    return Delivery(app.tasks[task.name], request_, world.lock(), None, Notes())


def test_with_the_broker_away_a_late_acknowledged_one_is_given_back(delivery, broker):
    """The broker has the message still, and delivers it again."""
    broker.times_away = 1
    delivery.task.acks_late = True
    with pytest.raises(Reject) as rejected:
        put_off(delivery, "held")
    assert rejected.value.requeue is True


@pytest.mark.parametrize("error", [None, StoreError("redis://", "away")])
def test_the_reservation_of_a_message_that_is_put_off_is_kept_until_it_comes(
    delivery, world, broker, error
):
    """And for as long as it may wait then.  With the lock server away nobody asks it for that."""
    delivery.reservation = Reservation("dislock:{k}", "1", "end", 60.0, "ab", 3)
    with pytest.raises(Ignore if error is None else Retry):
        put_off(delivery, "held", error=error)
    asked = world.store.reservations.asked
    if error is not None:
        assert asked == []
    else:
        [(what, kept)] = asked
        assert what == "confirm"
        assert 0.75 <= kept.ttl - delivery.options.lock_unique_for <= 1.25
        assert kept._replace(ttl=60.0) == delivery.reservation
