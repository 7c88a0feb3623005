"""The options of a task: what each accepts, and what follows from it."""

from __future__ import annotations

import pytest

from celery_dislock.config.settings import (
    task_options,
)


def decide(task, conflict):
    raise AssertionError


@pytest.mark.parametrize("strategy", ["skip", "raise", "retry", "wait", "queue", "reject", decide])
def test_every_strategy_is_accepted(strategy):
    """A strategy is a name, or a callable that takes the task and the conflict."""
    options = task_options("t", {"lock_on_conflict": strategy}, {})
    assert options.lock_on_conflict is strategy


@pytest.mark.parametrize(
    ("declared", "parks"),
    [
        ({}, False),
        ({"lock_on_conflict": "wait"}, False),
        ({"lock_on_conflict": "queue"}, True),
        ({"lock_on_conflict": "queue", "lock_key": "k"}, True),
        ({"lock_on_conflict": "queue", "lock_key": ["k"]}, True),
        ({"lock_on_conflict": decide}, True),
        ({"lock_on_conflict": decide, "lock_key": ["a", "b"]}, False),
    ],
)
def test_a_task_may_be_parked_that_says_so_or_asks_a_callable(declared, parks):
    """Nobody knows what a callable will say; a task of several keys is never parked."""
    assert task_options("t", declared, {}).parks is parks
