"""What the page asks of an app's locks."""

from __future__ import annotations

import json

import pytest

from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.operating.web import backend
from celery_dislock.operating.web.backend import Backend, lock_as_json
from celery_dislock.parking.process import runtime_of
from tests.pages import holder, lock, place


@pytest.fixture
def known(app):
    return Backend(runtime_of(app), app)


def test_a_key_has_a_name_and_only_locks_have_names(known):
    """Both with the app's prefix."""
    assert known.name_of("export:7") == "dislock:{export:7}"
    assert known.is_name("dislock:{export:7}")
    assert known.is_name("dislock:{export:7}:and:0123abcd")
    assert not known.is_name("dislock:{export:7}:line")
    assert not known.is_name("other:{export:7}")
    with pytest.raises(LockKeyError):
        known.name_of("")


def test_actions_need_an_app(app, known, monkeypatch):
    """A lock server alone cannot tell a parked task's result."""
    monkeypatch.setattr(backend, "Actions", lambda *given: given)
    assert known.actions == (app, runtime_of(app).process)
    with pytest.raises(SettingsError, match="Celery app"):
        _ = Backend(runtime_of(app), None).actions


def test_locks_that_were_looked_at_are_remembered_for_a_moment(known, overview, monkeypatch):
    """For all who look at them; the number of those that are kept is bounded."""
    monkeypatch.setattr(backend, "LOOKED_AT", 2)
    for _ in range(3):
        known.lock("dislock:{a}")
    assert len(overview.asked) == 1
    for key in "bcdef":
        known.lock(f"dislock:{{{key}}}")
    assert len(known._locks) == 2


def test_the_numbers_of_a_lock_survive_javascript():
    """A token is larger than a number there; the whole is plain JSON."""
    state = lock(holders=[holder(token=2**60 + 1)], line=[place(1)], turns=[place(0)])
    told = lock_as_json(state, 40, show_owners=False, show_arguments=True)
    assert told["holders"][0]["token"] == "1152921504606846977"  # noqa: S105 -- a fencing token
    assert told["line"][0]["place"] == 41
    assert told["turns"][0]["place"] == 0
    assert json.loads(json.dumps(told)) == told


def test_a_lock_with_many_leases_is_cut(monkeypatch):
    """The browser gets the oldest of them, and their number."""
    monkeypatch.setattr(backend, "HOLDERS_MOST", 2)
    state = lock(holders=[holder(number) for number in range(5)])
    told = lock_as_json(state, 0, show_owners=True, show_arguments=False)
    assert [one["id"] for one in told["holders"]] == ["id-4", "id-3"]
    assert told["held_by"] == 5


def test_texts_of_any_length_are_cut():
    """All but what names the lease or the ticket in a form."""
    long = "x" * 100_000
    state = lock(
        holders=[holder(who=long, task=long, host=long, owner=long)],
        line=[place(who=long, args=long, ticket=long)],
    )
    told = lock_as_json(state, 0, show_owners=True, show_arguments=True)
    (one,), (waits,) = told["holders"], told["line"]
    assert {len(one[name]) for name in ("who", "task", "host")} == {503}
    assert {len(waits[name]) for name in ("who", "args")} == {503}
    assert (one["owner"], waits["ticket"]) == (long, long)
