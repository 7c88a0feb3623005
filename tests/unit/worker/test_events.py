"""The step that tells pool processes whether events are wanted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker.consumer.consumer import Consumer
from celery.worker.consumer.events import Events as CelerysStep
from kombu.utils.imports import symbol_by_name

from celery_dislock.messages.events import events_of
from celery_dislock.worker.events import LOOK_EVERY, EventStep


@pytest.fixture
def consumer(app):
    """A consumer whose timer the test looks at."""
    due = []

    def call_repeatedly(seconds, call):
        assert seconds == LOOK_EVERY
        due.append(call)
        return SimpleNamespace(cancel=lambda: due.remove(call))

    timer = SimpleNamespace(call_repeatedly=call_repeatedly, due=due)
    return SimpleNamespace(app=app, timer=timer, event_dispatcher=dispatcher("worker"))


def dispatcher(*groups):
    return SimpleNamespace(enabled=True, groups=set(groups), buffer_group=())


def test_every_worker_has_the_step(app):
    """Also of an app that only has a SingletonTask."""
    app.finalize()
    assert EventStep in map(symbol_by_name, app.steps["consumer"])


def test_it_looks_again_and_again(app, consumer):
    """Nobody tells it that a monitor turned events on."""
    step = EventStep(consumer)
    step.start(consumer)
    events = events_of(app)
    assert events._wanted[0] == 0
    consumer.event_dispatcher.groups.add("task")
    [look] = consumer.timer.due
    look()
    assert events._wanted[0] == 1


def test_it_follows_the_dispatcher_of_each_connection(app, consumer):
    """Where the broker was away, the consumer starts anew, with another dispatcher."""
    step = EventStep(consumer)
    step.start(consumer)
    step.stop(consumer)
    assert consumer.timer.due == []
    consumer.event_dispatcher = dispatcher("task")
    step.start(consumer)
    step.start(consumer)
    assert events_of(app).wanted
    assert len(consumer.timer.due) == 1


def test_a_step_that_was_not_started_can_be_stopped(consumer):
    """A worker that fails while it starts stops all its steps."""
    EventStep(consumer).stop(consumer)


def test_it_starts_after_celerys_own(app):
    """Which makes the dispatcher."""
    blueprint = Consumer.Blueprint(steps={EventStep})
    order = blueprint._finalize_steps(blueprint.claim_steps())
    assert order.index(EventStep) > order.index(CelerysStep)
