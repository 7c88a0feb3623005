"""What a worker does again and again goes on when it has lost its broker and found it again."""

from types import SimpleNamespace

import pytest

from celery_dislock.worker.timed import ReconnectStep, TimedStep

EVERY = 5.0  # seconds


class Counting(TimedStep):
    """Counts how often it has worked."""

    every = EVERY
    times = 0
    ended = False

    def begin(self, _worker):
        pass

    def work(self):
        self.times += 1

    def end(self):
        self.ended = True


@pytest.fixture
def step(worker):
    step = Counting(worker)
    worker.steps = [SimpleNamespace(), step]
    step.start(worker)
    return step


def connect(worker, nth):
    """Start the steps of the worker's consumer, as each of its connections does."""
    consumer = SimpleNamespace(controller=worker, restart_count=nth)
    ReconnectStep(consumer).start(consumer)


@pytest.mark.parametrize("clears", [True, False], ids=["before 5.7", "from 5.7 on"])
def test_it_goes_on_when_the_broker_is_there_again(worker, step, lock_server, clears):
    """Celery before 5.7 empties the timer when the connection is lost; nothing comes twice."""
    connect(worker, 0)
    lock_server.advance(2.2 * EVERY)
    assert step.times == 3
    for nth in (1, 2, 3):
        if clears:
            worker.timer.clear()
        connect(worker, nth)
    lock_server.advance(0)
    assert step.times == 4
    lock_server.advance(2.2 * EVERY)
    assert step.times == 6


@pytest.mark.parametrize("shutdown", ["stop", "terminate"])
def test_what_was_stopped_does_not_go_on(worker, step, lock_server, shutdown):
    """A worker that shuts down may connect once more; a cold shutdown ends the step, too."""
    getattr(step, shutdown)(worker)
    assert step.ended
    connect(worker, 1)
    lock_server.advance(2 * EVERY)
    assert step.times == 0


def test_it_hears_that_the_broker_is_lost(worker, step, monkeypatch):
    """Its timer may stand still from then on."""
    heard = []
    monkeypatch.setattr(step, "bridge", heard.append)
    ReconnectStep(None).stop(SimpleNamespace(controller=worker))
    assert heard == [worker]
