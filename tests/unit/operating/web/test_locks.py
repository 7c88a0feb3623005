"""What the page asks of an app's locks, and how a lock becomes JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from celery_dislock import Dislock
from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.operating.web import locks
from celery_dislock.operating.web.locks import AppLocks, as_json
from celery_dislock.parking.process import runtime_of
from tests.pages import RESERVED, holder, lock, place


def test_a_key_has_a_name_and_only_locks_have_names(app):
    """Both with the app's prefix."""
    known = AppLocks(app)
    assert known.name_of("export:7") == "dislock:{export:7}"
    assert known.is_name("dislock:{export:7}")
    assert known.is_name("dislock:{export:7}:and:0123abcd")
    assert not known.is_name("dislock:{export:7}:line")
    assert not known.is_name("other:{export:7}")
    with pytest.raises(LockKeyError):
        known.name_of("")


def test_it_takes_an_app_or_its_dislock(app, monkeypatch):
    """Actions need the app: a lock server alone cannot tell a parked task's result."""
    monkeypatch.setattr(locks, "Actions", lambda app, _process: app)
    for given in (app, Dislock(app)):
        assert AppLocks(given).actions is app
    with pytest.raises(SettingsError, match="Celery app"):
        _ = AppLocks(SimpleNamespace(runtime=runtime_of(app))).actions
    with pytest.raises(SettingsError, match="Celery app"):
        AppLocks("redis://")


def test_owners_marks_and_arguments_are_left_out_unless_asked_for():
    """An owner ends a lease, a mark a reservation, and arguments may be secret."""
    state = lock(holders=[holder()], line=[place()], turns=[place()], reservation=RESERVED)
    told = as_json(state)
    assert [one["args"] for one in told["line"] + told["turns"]] == [None, None]
    assert (told["holders"][0]["owner"], told["reservation"]["mark"]) == (None, None)
    told = as_json(state, show_owners=True, show_arguments=True)
    assert {one["args"] for one in told["line"] + told["turns"]} == {"('4111-1111',) {}"}
    assert told["holders"][0]["owner"] == "id-1@celery@w1:7/ab.1"
    assert (told["reservation"]["mark"], told["reservation"]["number"]) == ("5eed", 7)
    assert json.loads(json.dumps(told)) == told


def test_a_token_survives_javascript():
    """A number of JavaScript has 53 bits."""
    told = as_json(lock(holders=[holder(token=2**60 + 1)]))
    assert told["holders"][0]["token"] == "1152921504606846977"  # noqa: S105 -- a fencing token


def test_a_lock_with_many_leases_is_cut(monkeypatch):
    """The browser gets the oldest of them, and their number."""
    told = as_json(lock(holders=[holder(number) for number in range(5)]), most=2)
    assert [one["id"] for one in told["holders"]] == ["id-4", "id-3"]
    assert told["held_by"] == 5
    assert locks.HOLDERS_MOST < 1000
