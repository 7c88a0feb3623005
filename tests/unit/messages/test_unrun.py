"""A task that is sent again for later: when, and with what."""

from __future__ import annotations

import pytest
from celery.app.task import Context
from celery.exceptions import Reject

from celery_dislock import SingletonTask
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import Notes
from celery_dislock.messages.unrun import put_off


@pytest.fixture
def request_():
    """Celery's, which Celery keeps."""
    return Context({"id": "1", "task": "t", "retries": 2, "args": (), "headers": {}})


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
