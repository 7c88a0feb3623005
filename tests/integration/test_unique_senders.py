"""Uniqueness when sending: fresh processes, in which nothing was used before.

On a real server only: a sender waits a quarter of a second for a reply, then it sends without a
reservation.  fakeredis in a busy process may take longer.
"""

import json
import os

import pytest

from tests.forked import ROOT, run_python


@pytest.fixture
def send(redis_url):
    """Send in a fresh process; return the id of each result, and whether it is a duplicate."""

    def send(plugin, way):
        program = ["tests.integration.unique_sender", redis_url, plugin, way]
        told = run_python(*program, folder=ROOT, env=os.environ)
        assert (told.returncode, told.stderr) == (0, "")
        return json.loads(told.stdout)

    return send


@pytest.mark.parametrize("plugin", ["plugin", "plain"])
def test_first_sends_of_many_threads(send, redis_client, plugin):
    """Eight threads that use the task for the first time at once send one message."""
    for _ in range(3):
        redis_client.flushdb()
        results = send(plugin, "threads")
        assert redis_client.llen("celery") == 1
        assert len({task_id for task_id, _ in results}) == 1
        assert sorted(duplicate for _, duplicate in results) == [False] + [True] * 7


@pytest.mark.parametrize(
    ("plugin", "way"), [("plain", "by name"), ("plain", "beat"), ("plugin", "delay")]
)
def test_two_sends_are_one_message(send, redis_client, plugin, way):
    """By a program that has made no plugin too, by a name or by beat."""
    (first, *is_first), (second, *is_second) = send(plugin, way)
    assert redis_client.llen("celery") == 1
    assert first == second
    assert first in redis_client.get("dislock:{edit:1}:unique").split(" ")
    assert (is_first, is_second) == ([False], [True])
