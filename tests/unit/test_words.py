"""Times as messages and tools write them."""

import json
import math
import re
import time

import pytest

from celery_dislock.words import (
    as_argument,
    filled,
    for_people,
    plain,
    so_far,
    time_of_day,
    to_json,
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "?"),
        (-0.3, "0.0 s"),
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (10, "10 s"),
        (119, "119 s"),
        (120, "2 min"),
        (12 * 60 + 59, "12 min"),
        (3600 + 5 * 60, "1 h 05 min"),
        (47 * 3600 + 59 * 60, "47 h 59 min"),
        (51 * 3600, "2 d 3 h"),
        *((damaged, "?") for damaged in (math.nan, math.inf, -math.inf, 10.0**300)),
    ],
)
def test_a_time_is_written_as_people_say_it(seconds, words):
    """Two units at most, and tenths only where they count."""
    assert for_people(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (90.0, r"\d\d:\d\d:\d\d \S+"),
        (86394.9, r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+"),
        (1e300, r"\?"),
    ],
)
def test_a_time_of_day_has_the_date_if_that_is_far(seconds, shown):
    """It can be read later, and elsewhere: it has the zone of the clock here."""
    assert re.fullmatch(shown, time_of_day(time.time() + seconds))


@pytest.mark.parametrize(
    ("held_for", "renewed", "words"),
    [
        (None, None, ""),
        (None, 3.0, ""),
        (720.0, None, ", for 12 min so far"),
        (720.0, 3.1, ", for 12 min so far, last renewed 3.1 s ago"),
        (4.0, 4.0, ", for 4.0 s so far"),
        (4.0, 3.9, ", for 4.0 s so far"),
        (0.0, 0.0, ", for 0.0 s so far"),
    ],
)
def test_what_follows_a_holder_says_how_long_and_whether_it_lives(held_for, renewed, words):
    """A lease that was never renewed has no renewal to tell; an unknown time is left out."""
    assert so_far(held_for, renewed) == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export:7", "export:7"),
        ("Zürich 東京", "Zürich 東京"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\x9b\x7f", "a\\nb\\tc\\x9b\\x7f"),
        ("\u202eabc\u200b\ufeff", "\\u202eabc\\u200b\\ufeff"),
        ("a\u061cb\u2060c\xadd", "a\\u061cb\\u2060c\\xadd"),
        ("\U000e0041\u2028\ud800", "\\U000e0041\\u2028\\ud800"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_text_is_shown_as_it_is_written(text, shown):
    """Nothing in it is invisible, moves a cursor, turns the direction or ends a line."""
    assert plain(text) == shown
    assert plain(shown) == shown


def test_json_has_no_number_that_json_does_not_have():
    """What is not finite is null, however deep; what is finite stays as it is."""
    strange = {"a": [math.nan, {"b": (math.inf, -math.inf)}], "c": 1.5, "d": math.nan}
    assert json.loads(to_json(strange)) == {"a": [None, {"b": [None, None]}], "c": 1.5, "d": None}
    assert to_json({"a": [1.5, "NaN", None, True]}) == '{"a": [1.5, "NaN", null, true]}'
    assert to_json({"a": object}, indent=1, default=lambda _one: "x") == '{\n "a": "x"\n}'


def test_commands_have_their_arguments_as_a_shell_reads_them():
    """What is put in place of a name is not looked into again."""
    told = "Drop it: drop TICKET KEY"
    assert filled(told, KEY=as_argument("export:7"), TICKET=as_argument("|KEY")) == (
        "Drop it: drop '|KEY' export:7"
    )
