"""How locks for plain Python are made; the options of each are tested with Dislock.lock."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.locks.making import keys_of, make_lock
from celery_dislock.parking.process import runtime_of


@pytest.mark.parametrize(
    ("key", "keys"),
    [("k", ["k"]), (["b", "a", "b"], ["a", "b"]), (("k",), ["k"])],
)
def test_keys_are_taken_in_one_order(key, keys):
    """Each once, and in the order of all others."""
    assert list(keys_of(key)) == keys


@pytest.mark.parametrize(
    "key", ["", "a{b", "a:<b>", "a:%(b)s", [], ["a", ""], ["a", "<b.c>"], b"k", None, 7]
)
def test_a_key_that_cannot_be_used(key):
    """The error is the same as for a task."""
    with pytest.raises(LockKeyError):
        keys_of(key)


def test_options_that_are_none_are_not_given(app):
    """The app's setting holds for those."""
    app.conf.dislock_watchdog_timeout = 7
    lock = make_lock(runtime_of(app), "k", {"lock_watchdog_timeout": None, "lock_mode": "shared"})
    assert lock._options.lock_watchdog_timeout == 7
    assert lock._options.lock_mode == "shared"


def test_an_error_names_the_option_as_dislock_lock_has_it(app):
    """Without the prefix of the task's option."""
    with pytest.raises(SettingsError, match="mode='both'"):
        make_lock(runtime_of(app), "k", {"lock_mode": "both"})
    with pytest.raises(SettingsError, match="timeout=-1"):
        make_lock(runtime_of(app), "k", {}, timeout=-1)
    with pytest.raises(SettingsError, match="fair='no'"):
        make_lock(runtime_of(app), "k", {}, fair="no")
