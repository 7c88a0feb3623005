"""The names of all locks, while some servers do not answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.overview import Overview

ERROR = StoreError("redis://b", "no answer in time")


def answers(*_command):
    return b"0", [b"dislock:{a}", b"dislock:{a}:line"]


def is_away(*_command):
    raise ERROR


def overview(*senders, kind="cluster"):
    return Overview(SimpleNamespace(senders=lambda: list(senders), kind=kind), "dislock")


def test_a_server_that_is_away_is_an_error():
    """What was not read must not pass for what is not there."""
    with pytest.raises(StoreError, match="no answer in time"):
        list(overview(answers, is_away).names())


def test_the_others_are_read_if_somebody_takes_the_error():
    """One of several servers may be away."""
    failed = []
    assert list(overview(is_away, answers).names(failed=failed)) == [["dislock:{a}"]]
    assert failed == [ERROR]


def test_a_majority_of_independent_servers_is_enough():
    """Each has all locks; a minority may have missed some."""
    assert list(overview(is_away, answers, answers, kind="quorum").names()) == [["dislock:{a}"]]
    with pytest.raises(StoreError, match="no answer in time"):
        list(overview(is_away, answers, is_away, kind="quorum").names())


def test_all_of_them_are_away():
    """Then there is nothing to tell."""
    with pytest.raises(StoreError, match="no answer in time"):
        list(overview(is_away, is_away).names(failed=[]))
