"""The signals, as users connect to them."""

import pytest
from celery.utils.dispatch import Signal

from celery_dislock import signals


def test_every_signal_is_public():
    """What can be connected to is what the documentation is made from."""
    made = {name for name, one in vars(signals).items() if isinstance(one, Signal)}
    assert made == set(signals.__all__)


@pytest.mark.parametrize("name", signals.__all__)
def test_a_signal_is_called_as_it_is_imported(name):
    """Celery's log of a receiver that raised names the signal."""
    assert getattr(signals, name).name == name
