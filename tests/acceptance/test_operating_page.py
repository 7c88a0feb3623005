"""What an operator does to locks of real workers on the page."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_dislock.operating.web import Page
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for
from tests.pages import Visitor
from tests.pages import ann as named_ann

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue


@pytest.fixture
def ann():
    """Somebody who may act on the page of the scenarios' app."""
    page = Page(scenarios.app, user=named_ann, allow_actions=True, show_arguments=True)
    return Visitor(page)


def shown(visitor, key):
    return visitor.get("/api/lock", query_string={"key": key}).json


def fields(visitor, key):
    """Return the form that frees what the page shows."""
    told = shown(visitor, key)
    (holder,) = told["holders"]
    return {"name": told["name"], "owner": holder["owner"], "token": holder["token"]}


@PREFORK
def test_a_lock_is_freed_once(fleet, scene, ann):
    """Of two operators who press the button, one is told that the lease had ended."""
    holder = fleet.send(scenarios.hold_renewed, scene.key)
    scene.wait_for_report("begin", id=holder.id)
    form = fields(ann, scene.key)
    bob = Visitor(ann.application)
    answers = [visitor.act("/api/free", **form).json["done"] for visitor in (ann, bob)]
    assert answers == [True, False]
    wait_for("the worker says so", lambda: fleet.says(scene.key, "is lost"))
    scene.open_gate()
    assert holder.get(timeout=LIMIT)["held"] is False


@PREFORK
def test_a_holder_is_ended_on_the_page(fleet, scene, ann):
    """Its lock is released by its worker, and the parked task runs."""
    holder = fleet.send(QUEUE, scene.key)
    dead = scene.wait_for_report("begin", id=holder.id)["pid"]
    parked = fleet.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    (place,) = shown(ann, scene.key)["line"]
    assert (place["id"], place["parked"]) == (parked.id, True)
    assert scene.key in place["args"]
    assert ann.act("/api/terminate", **fields(ann, scene.key)).json["done"] is True
    with pytest.raises(TaskRevokedError):
        holder.get(timeout=LIMIT)
    scene.wait_for_report("begin", id=parked.id)
    scene.open_gate()
    assert parked.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive(dead=[dead])


@PREFORK
def test_a_parked_task_is_dropped_on_the_page(fleet, scene, ann):
    """Its caller is told, and it never runs."""
    holder = fleet.send(scenarios.hold_by_itself, scene.key)
    scene.wait_for_report("begin", id=holder.id)
    parked = fleet.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    told = shown(ann, scene.key)
    form = {"name": told["name"], "ticket": told["line"][0]["ticket"]}
    assert ann.act("/api/drop", **form).json["done"] is True
    assert ann.act("/api/drop", **form).json["done"] is False
    with pytest.raises(TaskRevokedError, match="dropped by an operator"):
        parked.get(timeout=LIMIT)
    scene.open_gate(holder.id)
    holder.get(timeout=LIMIT)
