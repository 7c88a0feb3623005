"""What ``drain`` shows, asks and tells; what it does is told by the fakes."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import SettingsError
from celery_dislock.operating.cli import draining
from celery_dislock.operating.draining import Sent
from celery_dislock.parking.process import StoreIdentity
from tests.unit.operating.cli.conftest import lock, place

FOUND, USAGE = 1, 2


class FakeDrain:
    """A store with two lines."""

    here, there, interval = "redis://new, prefix dislock", "redis://old, prefix dislock", 10.0

    def __init__(self):
        self.found = []
        self.sent = [Sent("dislock:{a}", "1:0:0"), Sent("dislock:{b}", "2:0:0")]
        self.error = None
        self.asked = []

    def __call__(self, _app, url, prefix):
        self.asked.append((url, prefix))
        return self

    def check(self):
        if self.error:
            raise self.error

    def lines(self):
        return iter([lock("a", waiting=7, turns=[place()]), lock("b\x1b", waiting=1)])

    def workers(self, seconds):
        self.asked.append(seconds)
        return self.found

    def run(self):
        self.asked.append("run")
        yield from self.sent

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def drain(monkeypatch):
    fake = FakeDrain()
    monkeypatch.setattr(draining, "Drain", fake)
    return fake


def test_the_lines_are_shown_and_sent_on_after_a_yes(dislock, drain):
    """With how many are in each, those with a turn too; then how many were sent."""
    answer = dislock("drain", "--from-url", "redis://old", input="y\n")
    assert answer.exit_code == 0
    assert answer.stdout.splitlines()[:2] == ["KEY    IN LINE", "a      8"]
    assert "\x1b" not in answer.stdout
    assert "9 parked in 2 lines on redis://old, prefix dislock." in answer.stderr
    assert "Send them on, to redis://new, prefix dislock?" in answer.stderr
    assert "Sent on 2." in answer.stderr
    assert drain.asked == [("redis://old", None), 15.0, "run", "closed"]


def test_who_answers_no_changes_nothing(dislock, drain):
    """The lines were shown; the exit code is that of a finding."""
    assert dislock("drain", "--from-prefix", "old", input="n\n").exit_code == FOUND
    assert drain.asked == [(None, "old"), 15.0, "closed"]


def test_a_drain_from_nowhere_and_from_here_is_wrong_usage(dislock, drain):
    """Nothing is looked at."""
    assert "--from-url URL, --from-prefix PREFIX" in dislock("drain").stderr
    drain.error = SettingsError("drain", "dislock_url", "redis://new", "this is where")
    assert dislock("drain", "--from-url", "redis://new", "--yes").exit_code == USAGE
    assert drain.asked == [("redis://new", None), "closed"]


def test_a_store_that_is_lost_is_taken_over_by_its_name(dislock, monkeypatch):
    """Nothing is left there to be sent on; anything but a name is wrong usage."""
    taken = []
    monkeypatch.setattr(StoreIdentity, "take_over", lambda _self, name: taken.append(name))
    answer = dislock("drain", "--lost", "f" * 16)
    assert (answer.exit_code, taken) == (0, ["f" * 16])
    assert "belong here now" in answer.stderr
    assert dislock("drain", "--lost", "all").exit_code == USAGE
    dislock.app.conf.dislock_url = ["redis://a", "redis://b", "redis://c"]
    dislock.app.__dict__.pop("_dislock_runtime", None)
    assert dislock("drain", "--lost", "f" * 16).exit_code == USAGE
