"""An app's locks as the commands and the page have them, and the words of what was done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock import Dislock
from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.operating import locks
from celery_dislock.operating.locks import AppLocks, limited
from celery_dislock.parking.process import runtime_of


def test_it_takes_an_app_or_its_dislock(app, monkeypatch):
    """Actions need the app: a lock server alone cannot store a parked task's result."""
    monkeypatch.setattr(locks, "Actions", lambda app, _process: app)
    for given in (app, Dislock(app)):
        assert AppLocks(given).actions is app
    with pytest.raises(SettingsError, match="Celery app"):
        _ = AppLocks(SimpleNamespace(runtime=runtime_of(app))).actions
    with pytest.raises(SettingsError, match="Celery app"):
        AppLocks("redis://")


def test_a_key_has_a_name_with_the_apps_prefix(app):
    """The key as people write it; one that cannot be used is an error."""
    assert AppLocks(app).name_of("export:7") == "dislock:{export:7}"
    with pytest.raises(LockKeyError):
        AppLocks(app).name_of("")


@pytest.mark.parametrize(
    ("set_to", "words"),
    [
        ((0, "by me"), "paused lock 'k', with the note 'by me'"),
        (
            (0, "by me: x\x1b", 600.0),
            r"paused lock 'k' for 10 min, with the note 'by me: x\x1b'",
        ),
        ((3, "by me"), "limited lock 'k' to 3 leases, with the note 'by me'"),
        ((None, ""), "took back the limit of lock 'k'"),
    ],
)
def test_a_limit_is_logged_in_words(set_to, words):
    """The same from a command and from the page."""
    assert limited("dislock:{k}", *set_to) == words
