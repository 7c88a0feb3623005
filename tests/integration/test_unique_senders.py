"""Uniqueness from the first send of a process, whatever was made before: nothing, or a Dislock."""

from __future__ import annotations

import json
import os

import pytest

from tests.forked import ROOT, run_python
from tests.integration.test_unique import messages, reserved_for

PROCESSES = 3
ONE = ["delay", "apply_async", "signature", "by name", "signature of a name", "beat"]

plugins = pytest.mark.parametrize("plugin", ["plugin", "plain"])


@pytest.fixture
def send(redis_url):
    """Send in a fresh process; return the id of each result, and whether it is a duplicate."""

    def send(plugin, way):
        program = ["tests.integration.unique_sender", redis_url, plugin, way]
        told = run_python(*program, folder=ROOT, env=os.environ)
        assert (told.returncode, told.stderr) == (0, "")
        return json.loads(told.stdout)

    return send


@plugins
def test_first_sends_of_many_threads(send, redis_client, plugin):
    """Eight threads that use the task for the first time at once send one message."""
    for _ in range(PROCESSES):
        redis_client.flushdb()
        results = send(plugin, "threads")
        assert messages(redis_client) == 1
        assert len({task_id for task_id, _ in results}) == 1
        assert sorted(duplicate for _, duplicate in results) == [False] + [True] * 7


@pytest.mark.parametrize(
    ("plugin", "way"),
    [*(("plain", way) for way in ONE), ("plugin", "delay"), ("plugin", "by name")],
)
def test_two_sends_are_one_message(send, redis_client, plugin, way):
    """By whatever way of Celery's a task is sent."""
    (first, *is_first), (second, *is_second) = send(plugin, way)
    assert messages(redis_client) == 1
    assert first == second == reserved_for(redis_client)
    assert (is_first, is_second) == ([False], [True])
