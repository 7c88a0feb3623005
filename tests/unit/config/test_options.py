"""The options of a task: what each accepts, and what follows from it."""

import re
import sys

import pytest

from celery_dislock import Key, SettingsError
from celery_dislock.config.settings import task_options
from celery_dislock.config.terms import LIMIT_MOST

UNIQUE = {"lock_unique_until": "start"}


def decide(task, conflict):
    raise AssertionError


@pytest.mark.parametrize(
    ("declared", "parks"),
    [
        ({}, False),
        ({"lock_on_conflict": "wait"}, False),
        ({"lock_on_conflict": "queue"}, True),
        ({"lock_on_conflict": "queue", "lock_key": "k"}, True),
        ({"lock_on_conflict": "queue", "lock_key": ["k"]}, True),
        ({"lock_on_conflict": decide}, True),
        ({"lock_on_conflict": decide, "lock_key": ["a", "b"]}, True),
    ],
)
def test_a_task_may_be_parked_that_says_so_or_asks_a_callable(declared, parks):
    """Nobody knows what a callable will say; so it may park."""
    assert task_options("t", declared, {}).parks is parks


@pytest.mark.parametrize(
    ("declared", "keys", "terms"),
    [
        ({}, (None,), [(1, None)]),
        ({"lock_key": "k"}, ("k",), [(1, None)]),
        ({"lock_key": ["a", "b"]}, ("a", "b"), [(1, None)]),
        ({"lock_key": [Key("a", limit=3), "b"]}, ("a", "b"), [(3, None), (1, None)]),
        ({"lock_key": ["a", Key("b", 1)], "lock_limit": 5}, ("a", "b"), [(5, None), (1, None)]),
        ({"lock_key": Key("a", limit=3)}, ("a",), [(3, None)]),
        ({"lock_key": "k", "lock_rate": "5/2h"}, ("k",), [(LIMIT_MOST, (5, 7200))]),
        ({"lock_key": "k", "lock_rate": 9, "lock_limit": 2}, ("k",), [(2, (9, 1))]),
        (
            {"lock_key": [Key("a", rate="1/d"), Key("b", 4), "c"], "lock_rate": "2 / m"},
            ("a", "b", "c"),
            [(LIMIT_MOST, (1, 86400)), (4, (2, 60)), (LIMIT_MOST, (2, 60))],
        ),
        ({"lock_key": [Key("a", 2, "3/10s"), "b"]}, ("a", "b"), [(2, (3, 10)), (1, None)]),
    ],
)
def test_a_key_may_have_terms_of_its_own(declared, keys, terms):
    """The others have those of the task; a key with a rate and without a limit has no limit."""
    options = task_options("t", declared, {})
    assert (options.keys, [one[1:3] for one in options.terms]) == (keys, terms)
    assert options.admits_several is (max(limit for limit, _ in terms) > 1)


SEVERAL = {"dislock_url": [f"redis://{host}" for host in "abc"]}
CLUSTER = {"dislock_url": "redis+cluster://a:7000"}
RATED = {"lock_key": ["a", "b"], "lock_rate": "1/s"}


@pytest.mark.parametrize(
    ("declared", "conf", "words"),
    [
        ({"lock_key": Key("a", limit=0)}, {}, "give 1 or more"),
        ({"lock_key": Key("a", limit=sys.maxsize)}, {}, "give 1000000000 or less"),
        ({"lock_limit": sys.maxsize}, {}, "give 1000000000 or less"),  # no script could read it
        ({"lock_key": [Key("a", limit="3"), "b"]}, {}, "whole number"),
        ({"lock_key": [Key(7, limit=3)]}, {}, "one template or callable"),
        ({"lock_key": Key(Key("a", 2), 2)}, {}, "give a template"),
        ({"lock_key": Key("a", 2), "lock_mode": "shared"}, {}, "no effect with lock_mode='shared'"),
        ({"lock_key": Key("a", 2), "lock_limit": None, **UNIQUE}, {}, "with lock_limit=None"),
        ({"lock_key": [Key("a", limit=1), "b"]}, SEVERAL, None),  # what they have anyway
        ({"lock_key": [Key("a", limit=2), "b"]}, SEVERAL, "exclusive locks only"),
        # Each node counts by itself, so a refusal by one would be a start at another.
        (RATED, CLUSTER, "nodes of a cluster count for themselves"),
        ({**RATED, "lock_key": "a"}, CLUSTER, None),
        (RATED, {}, None),
    ],
)
def test_a_limit_that_cannot_be_is_told(declared, conf, words):
    """When the task is bound, with its name, the option and what to give."""
    if words is None:
        assert task_options("t", declared, conf).has_rate is ("lock_rate" in declared)
        return
    with pytest.raises(SettingsError, match=words):
        task_options("t", declared, conf)


@pytest.mark.parametrize(
    ("rate", "words"),
    [("0.5/s", "write '1/2s': both"), ("10", "give a rate as '100/m'"), (",", "give a rate as")],
)
def test_what_is_no_rate_is_answered_with_one(rate, words):
    """With what it meant, where that can be said: the text can be copied."""
    with pytest.raises(SettingsError, match=re.escape(words)):
        task_options("t", {"lock_key": Key("a", rate=rate)}, {})
