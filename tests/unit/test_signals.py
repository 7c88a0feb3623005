"""The signals, as users connect to them."""

from __future__ import annotations

import pytest
from celery.utils.dispatch import Signal

from celery_dislock import signals


def test_every_signal_is_public_and_in_the_table():
    """What can be connected to is what the module's table explains, and all of it."""
    made = {name for name, one in vars(signals).items() if isinstance(one, Signal)}
    assert made == set(signals.__all__)
    assert [name for name in made if f"``{name}``" not in signals.__doc__] == []


@pytest.mark.parametrize("name", signals.__all__)
def test_a_signal_is_called_as_it_is_imported(name):
    """Celery's log of a receiver that raised names the signal."""
    assert getattr(signals, name).name == name


@pytest.mark.parametrize("name", signals.__all__)
def test_the_table_tells_the_arguments(name):
    """Each argument that a receiver is given stands in the signal's row."""
    table = signals.__doc__.partition("signal               arguments")[2]
    [row] = [row for row in table.split("\n") if row.startswith(f"``{name}``")]
    assert [one for one in getattr(signals, name).providing_args if f"``{one}``" not in row] == []
