"""Unique tasks whose body gets models of pydantic: the sender and the worker have one key."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from pydantic import BaseModel

from celery_dislock import Dislock, SingletonTask

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery


class Order(BaseModel):
    """What the task gets."""

    id: int
    kind: str = "csv"


def body(order):
    return order.kind


body.__annotations__ = {"order": Order}  # Celery 5.5 reads none that is text


@pytest.fixture
def export(dislock_server):
    app = Celery("tested", broker="redis://localhost:1", set_as_current=False)
    Dislock(app)
    dislock_server.use(app)
    options = {"lock_key": "e:<order.id>:<order.kind>", "lock_unique_until": "end"}
    return app.task(base=SingletonTask, pydantic=True, shared=False, **options)(body)


def test_the_key_of_a_message_is_that_of_its_task(dislock_server, export):
    """Whether it names the defaults of the model or not."""
    first = export.delay({"id": "7"})
    dislock_server.assert_duplicate(export.delay({"id": 7, "kind": "csv"}))
    assert not export.delay({"id": 7, "kind": "pdf"}).duplicate
    with dislock_server.hold("e:7:csv"):
        assert dislock_server.run_parked() == 2
    dislock_server.assert_skipped(first)
    with pytest.raises(TaskRevokedError):
        first.get()
    after = export.delay({"id": 7})
    assert not after.duplicate
    dislock_server.run_parked()
    assert after.get() == "csv"


def test_arguments_that_are_not_valid_fail_in_the_worker(dislock_server, export):
    """The message is sent, as it is without a lock."""
    sent = export.delay({})
    dislock_server.run_parked()
    assert sent.state == "FAILURE"
    assert "ValidationError" in str(sent.result)
