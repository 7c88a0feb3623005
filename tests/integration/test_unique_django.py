"""Uniqueness when sending in transactions of Django: what is sent and reserved, and when."""

import json
import os

import pytest

from tests.forked import ROOT, run_python


@pytest.fixture
def site(redis_url):
    """Take these steps in a process with Django, and return what each has told."""
    pytest.importorskip("django")

    def take(*steps, on_duplicate="return"):
        asked = json.dumps([redis_url, on_duplicate, steps])
        program = ["tests.integration.django_sender", asked]
        told = run_python(*program, folder=ROOT, env=os.environ)
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    return take


def state(told):
    """How many messages wait after a step, and for which documents a key is reserved."""
    return told["messages"], told["reserved"]


def test_a_transaction_that_commits(site):
    """Nothing before; then one message and one reservation, and the next is a duplicate."""
    _, first, second, commit, later = site(
        "begin", "delay_on_commit 1", "delay_on_commit 1", "commit", "delay 1"
    )
    assert (first["returned"], second["returned"]) == (None, None)
    assert state(first) == state(second) == (0, [])
    assert state(commit) == state(later) == (1, ["1"])
    assert later["returned"]["duplicate"] is True


def test_a_savepoint_that_rolls_back(site):
    """What was sent in the inner block is dropped; the outer one's goes out."""
    *_, inner, commit, later = site(
        *("begin", "delay_on_commit 1", "begin", "delay_on_commit 2", "rollback", "commit"),
        "delay 2",
    )
    assert state(inner) == (0, [])
    assert state(commit) == (1, ["1"])
    assert later["returned"]["duplicate"] is False


def test_a_plain_delay_in_a_transaction_that_rolls_back(site):
    """It is out at once, as with Celery alone: it stays so, and the next is a duplicate of it."""
    _, sent, rollback, later = site("begin", "delay 1", "rollback", "delay 1")
    assert sent["returned"]["duplicate"] is False
    assert state(sent) == state(rollback) == state(later) == (1, ["1"])
    assert later["returned"] == {"id": sent["returned"]["id"], "duplicate": True}


def test_an_error_for_a_duplicate_comes_after_the_commit(site):
    """Django drops the calls that follow it: with delay_on_commit(), "return" is the one to use."""
    calls = ["delay_on_commit 1", "delay_on_commit 1", "delay_on_commit 2"]
    *_, commit = site("begin", *calls, "commit", on_duplicate="raise")
    assert commit["error"] == "DuplicateTaskError"
    assert state(commit) == (1, ["1"])
    *_, commit = site("begin", *calls, "commit")
    assert "error" not in commit
    assert state(commit) == (2, ["1", "2"])
