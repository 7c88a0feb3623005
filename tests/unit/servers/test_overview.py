"""Looking at the locks of a server, at one or at many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.names import reserved_lock
from celery_dislock.servers.overview import Overview, find_parked, look_at_all
from tests.unit.operating.cli.conftest import FakeOverview, lock, place, reserved
from tests.unit.servers.test_view import NAME, NOTHING

ERROR = StoreError("redis://b", "no answer in time")


def answers(*_command):
    return b"0", [b"dislock:{a}", b"dislock:{a}:line"]


def is_away(*_command):
    raise ERROR


def overview(*senders, kind="cluster"):
    return Overview(SimpleNamespace(senders=lambda: list(senders), kind=kind), "dislock")


@pytest.mark.parametrize(
    ("kind", "senders", "given", "read"),
    [
        ("cluster", [answers, is_away], None, False),
        ("cluster", [is_away, answers], [], True),
        ("cluster", [is_away, is_away], [], False),
        ("quorum", [is_away, answers, answers], None, True),
        ("quorum", [is_away, answers, is_away], None, False),
    ],
)
def test_a_server_that_is_away_is_an_error(kind, senders, given, read):
    """What was not read must not pass for what is not there, unless somebody takes the error."""
    names = overview(*senders, kind=kind).names(failed=given)
    if read:
        assert list(names) == [["dislock:{a}"]]
        assert given in (None, [ERROR])
    else:
        with pytest.raises(StoreError, match="no answer in time"):
            list(names)


class Server:
    """Answers about each lock with nothing, and has the keys that a test gives it."""

    kind = "single"
    name = "redis://fake"

    def __init__(self, *pages):
        self.pages = list(pages)
        self.asked = []

    def run(self, _script, keys, *arguments):
        self.asked.append((*keys, *arguments))
        return NOTHING

    def run_many(self, _script, calls, *, within):
        assert within > 0
        self.asked.append(len(calls))
        return [NOTHING for _ in calls]

    def senders(self):
        def send(_scan, cursor, *_how):
            at = int(cursor)
            following = at + 1 if at + 1 < len(self.pages) else 0
            return str(following).encode(), self.pages[at]

        return [send]


def test_each_lock_is_listed_once_however_many_keys_it_has():
    """And a key that belongs to no lock is none."""
    server = Server(
        [b"dislock:{a}", b"dislock:{a}:line", b"dislock:lines:x"],
        [b"dislock:{b}:limit", b"dislock:{a}"],
    )
    assert [one.key for one in Overview(server, "dislock").locks()] == ["a", "b"]


def test_locks_are_looked_at_in_pages():
    """So the server answers others in between."""
    server = Server([f"dislock:{{{number}}}".encode() for number in range(250)])
    assert len(list(Overview(server, "dislock").locks())) == 250
    assert server.asked == [100, 100, 50]


def test_keys_that_are_reserved_together_come_last():
    """Only then; a task with one key has its reservation beside its lock."""
    overview = FakeOverview()
    names = ["dislock:{a}", "dislock:{b}"]
    assert [one.key for one in look_at_all(overview, names)] == ["a", "b"]
    overview.put(lock("a and others", name=reserved_lock(names), reservation=reserved()))
    assert [one.key for one in look_at_all(overview, names)] == ["a", "b", "a and others"]
    assert [one.key for one in look_at_all(overview, names[:1])] == ["a"]


def test_a_parked_task_is_searched_in_pages(monkeypatch):
    """Until the end of the line; it may move up meanwhile, and is found once."""
    monkeypatch.setattr("celery_dislock.servers.overview.SEARCHED", 2)
    pages = {
        0: lock(waiting=5, turns=[place(0)], line=[place(1), place(2)]),
        2: lock(waiting=5, line=[place(3), place(2)]),
        4: lock(waiting=4, line=[]),
    }

    class Pages:
        def lock(self, _name, first, most):
            assert most == 2
            return pages[first]

    assert [one.place for one in find_parked(Pages(), NAME, "t2")] == [2]
    assert [one.place for one in find_parked(Pages(), NAME, "t0:0:0")] == [0]
    assert find_parked(Pages(), NAME, "t9") == []


def test_a_damaged_lock_costs_one_row():
    """The others are listed; to look at it alone is an error."""
    rubbish = [*NOTHING[:8], b"rubbish", -2]

    class Damaged(Server):
        def run(self, _script, _keys, *_arguments):
            return rubbish

        def run_many(self, _script, _calls, *, within):
            return [rubbish, NOTHING]

    overview = Overview(Damaged([b"dislock:{a}", b"dislock:{b}"]), "dislock")
    damaged, whole = overview.locks()
    assert isinstance(damaged, DamagedLockError)
    assert (damaged.lock, whole.key) == ("dislock:{a}", "b")
    with pytest.raises(DamagedLockError, match="cannot be read"):
        overview.lock("dislock:{a}")
