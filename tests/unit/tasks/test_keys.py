"""The keys of tasks whose body gets models of pydantic, in the worker and when sending."""

from __future__ import annotations

from datetime import timedelta  # noqa: TC003 -- pydantic reads it

import pytest
from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from celery_dislock.exceptions import LockKeyError
from tests.declaring import declare
from tests.unit.deliveries import deliver


class Customer(BaseModel):
    """What an order has."""

    id: int


class Order(BaseModel):
    """What a task gets."""

    customer: Customer
    kind: str = "csv"
    every: timedelta | None = None

    @field_validator("kind")
    @classmethod
    def of_the_context(cls, value: str, info: ValidationInfo) -> str:
        """Take it from the context, if that has one."""
        return (info.context or {}).get("kind", value)

    @property
    def shard(self) -> int:
        """What no message has."""
        return self.customer.id % 10


def plain(order, n=1):
    return order.shard


def bound(self, order, n=1):
    return order.shard, self.lease.key


for body in (plain, bound):  # Celery 5.5 reads no annotation that is text
    body.__annotations__ = {"order": Order}


def export(app, body=plain, **options):
    key = "e:<order.customer.id>:<order.kind>:<order.shard>:<n>"
    options = {"lock_key": key, "pydantic": True, **options}
    return declare(app, body, **options)


SAME = [
    {"customer": {"id": 17}},
    {"customer": {"id": "17"}, "kind": "csv"},
    Order(customer=Customer(id=17)),
]


@pytest.mark.parametrize("sent", SAME)
@pytest.mark.parametrize("body", [plain, bound])
def test_a_key_is_made_of_the_model_that_the_body_gets(app, body, sent):
    """With defaults, converted values and properties; given by position or by name."""
    task = export(app, body)
    assert task.lock_for(sent).key == task.lock_for(order=sent).key == "e:17:csv:7:1"
    ran = deliver(task, "1", sent).retval
    assert ran == (7 if body is plain else (7, "e:17:csv:7:1"))


def test_the_key_of_a_message_is_that_of_its_task(app, broker):
    """Whether it names the defaults of the model or not."""
    task = export(app, lock_unique_until="end")
    assert [task.delay(sent).duplicate for sent in SAME[:2]] == [False, True]
    assert not task.delay({"customer": {"id": 17}, "kind": "pdf"}).duplicate
    deliver(task, broker.ids[0], SAME[1], headers=broker.sent[0].headers)
    assert not task.delay(SAME[0]).duplicate


def test_a_callable_gets_the_model(app):
    """As the body does."""
    task = export(app, lock_key=lambda order, n: f"{order.shard}:{n}")
    assert task.lock_for(SAME[0], n=2).key == "7:2"


def test_the_digest_is_that_of_the_model(app):
    """A default that is left out makes no other key."""
    task = export(app, lock_key=None)
    assert len({task.lock_for(sent).key for sent in SAME}) == 1
    assert task.lock_for({"customer": {"id": 18}}).key != task.lock_for(SAME[0]).key


def test_a_model_that_cannot_be_digested_is_digested_as_it_was_sent(app):
    """What JSON can have can be digested."""
    task = export(app, lock_key=None)
    keys = {task.lock_for({"customer": {"id": 17}, "every": every}).key for every in (60, 61)}
    assert len(keys) == 2
    with pytest.raises(LockKeyError, match="Order cannot be digested"):
        task.lock_for(Order(customer=Customer(id=17), every=60))


def test_celerys_options_for_models_are_heeded(app):
    """Strictness and context are those of the body."""
    task = export(app, pydantic_strict=True, pydantic_context={"kind": "pdf"})
    assert task.lock_for({"customer": {"id": 17}, "kind": "csv"}).key == "e:17:pdf:7:1"
    with pytest.raises(ValidationError, match="valid integer"):
        task.lock_for({"customer": {"id": "17"}})


@pytest.mark.parametrize("unique", [{}, {"lock_unique_until": "end"}])
def test_arguments_that_are_not_valid_fail_the_task_as_they_do_without_a_lock(
    app, lock_server, unique
):
    """With the same error, and no lock is taken."""
    task = export(app, **unique)
    failed = deliver(task, "1", {"customer": {}}).retval.exception
    app.task(plain, name="unlocked", pydantic=True, shared=False)
    expected = deliver(app.tasks["unlocked"], "2", {"customer": {}}).retval.exception
    assert type(failed) is type(expected) is ValidationError
    assert failed.errors() == expected.errors()
    assert lock_server.requests == 0


def test_what_is_said_of_arguments_that_are_not_valid_is_one_line(app, broker, caplog):
    """The error of pydantic has several."""
    export(app, lock_unique_until="end").delay({"customer": {}})
    [told] = caplog.messages
    assert "its key is unknown: 1 validation error for Order\\ncustomer.id\\n" in told
    assert "\n" not in told
