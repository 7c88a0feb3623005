"""A step that works in the worker's timer, from its start to its stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker import WorkController
from celery.worker.components import Pool

from celery_dislock.worker.reservations import ReservationStep
from celery_dislock.worker.stalled import StalledStep
from celery_dislock.worker.steps import LockStep, SweepStep
from celery_dislock.worker.timed import EVERY, TimedStep


class Counting(TimedStep):
    """Begins after one second, and works every two; stops itself at the third time."""

    worked = ended = 0

    def begin(self, _worker):
        return 1.0

    def work(self):
        self.worked += 1
        if self.worked == 3:
            self.stop(None)
        return 2.0

    def end(self):
        self.ended += 1


class Failing(Counting):
    """Raises an exception each time."""

    def work(self):
        raise RuntimeError


@pytest.fixture
def worker(timer):
    return SimpleNamespace(timer=timer)


def test_an_error_does_not_end_it(worker):
    """A step that raises an exception is due again some seconds later."""
    Failing(worker).start(worker)
    with pytest.raises(RuntimeError):
        worker.timer.due.pop().run()
    assert [entry.after for entry in worker.timer.due] == [EVERY]


def test_it_works_again_and_again_until_it_is_stopped(worker):
    """Each time says when the next is due; one that stops meanwhile is the last."""
    step = Counting(worker)
    step.start(worker)
    for after in (1.0, 2.0, 2.0):
        entry = worker.timer.due.pop()
        assert (entry.after, worker.timer.due) == (after, [])
        entry.run()
    assert worker.timer.due == []
    assert (step.worked, step.ended) == (3, 1)


def test_a_stop_cancels_what_is_due(worker):
    """A step that was not started has nothing to end: a worker that fails stops all its steps."""
    step = Counting(worker)
    step.stop(worker)
    assert step.ended == 0
    step.start(worker)
    step.stop(worker)
    assert (worker.timer.due, step.ended) == ([], 1)


@pytest.mark.parametrize("kind", [SweepStep, StalledStep, ReservationStep])
def test_it_starts_after_the_pool(kind):
    """Else children may be forked while its thread imports a module, and wait for that for ever."""
    for _ in range(10):  # Celery orders steps that do not need each other by chance
        steps = [type(f"{kind.__name__}{number}", (kind,), {}) for number in range(3)]
        blueprint = WorkController.Blueprint(steps={LockStep, *steps})
        order = blueprint._finalize_steps(blueprint.claim_steps())
        assert all(order.index(step) > order.index(Pool) for step in steps)
