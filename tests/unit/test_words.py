"""Times as messages and tools write them."""

from __future__ import annotations

import pytest

from celery_dislock.words import for_people, so_far


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
    ],
)
def test_a_time_is_written_as_people_say_it(seconds, words):
    """Two units at most, and tenths only where they count."""
    assert for_people(seconds) == words


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
