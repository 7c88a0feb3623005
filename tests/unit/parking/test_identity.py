"""Which tasks were parked in this store, by its name."""

from __future__ import annotations

import pytest

from celery_dislock.parking.identity import DRAINED, ELSEWHERE, OURS, Came, StoreIdentity
from celery_dislock.scripts import STORE

KEY = "dislock:lines:@store"


class Server:
    """A store that has a name; notes what it was asked."""

    name = "redis://here"

    def __init__(self):
        self.store = None
        self.known = {}
        self.came = [b"", 0]
        self.asked = []

    def run(self, script, keys, name, other, asked):
        assert (script, keys) == (STORE, [KEY])
        self.asked.append((other, asked))
        if not name:
            return [b"", 0, *self.came]
        self.store = self.store or name
        if asked in {"taken", "drained"}:
            self.known[other] = {"taken": OURS, "drained": DRAINED}[asked]
        if asked == "renamed":
            self.known[self.store] = DRAINED
            self.store = other
        return [
            self.store.encode(),
            {self.store: OURS, **self.known}.get(other, ELSEWHERE),
            *self.came,
        ]


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def identity(server):
    return StoreIdentity(server, "dislock")


def test_a_store_is_named_once_and_asked_once(server, identity):
    """All processes agree on the name that the first gave; a turn of one's own costs nothing."""
    name = identity.name()
    assert len(name) == 16
    assert StoreIdentity(server, "dislock").name() == name
    server.asked.clear()
    assert identity.name() == name
    assert identity.whose(name)
    assert server.asked == []


def test_the_name_of_another_store_is_asked_for_each_time(server, identity):
    """An operator may have drained it meanwhile."""
    assert identity.whose("f" * 16) == ELSEWHERE
    StoreIdentity(server, "dislock").take_over("f" * 16, drained=True)
    assert identity.whose("f" * 16) == DRAINED
    StoreIdentity(server, "dislock").take_over("e" * 16)
    assert identity.whose("e" * 16) == OURS


@pytest.mark.parametrize("asks", ["confirm", "whose"])
def test_a_store_that_has_lost_its_data_is_still_the_same(server, identity, caplog, asks):
    """Another process has named it anew: tasks on their way under the old name belong here."""
    before = identity.name()
    server.store = "e" * 16
    if asks == "confirm":
        assert identity.confirm() == "e" * 16
    else:
        assert identity.whose("e" * 16)
    assert server.known == {before: OURS}
    assert identity.whose(before)
    assert "has lost its data" in caplog.text


def test_a_store_that_was_drained_gets_another_name(server, identity, caplog):
    """What was parked before is elsewhere; other stores know it by the former name only."""
    before = identity.name()
    identity.rename()
    assert identity.name() != before
    assert identity.whose(before) == DRAINED
    assert caplog.text == ""


def test_who_comes_first_gives_it_its_name_back(server, identity):
    """The server was emptied, and no other process has asked."""
    before = identity.name()
    server.store = None
    assert identity.confirm() == before
    assert server.known == {}


@pytest.mark.parametrize(
    ("came", "expected"), [([b"", 0], None), ([b"f" * 16, 1500], Came("f" * 16, 1.5))]
)
def test_the_last_task_from_elsewhere_is_told(server, identity, came, expected):
    """Who looks names nothing."""
    server.came = came
    assert identity.last_stranger() == expected
    assert server.store is None
