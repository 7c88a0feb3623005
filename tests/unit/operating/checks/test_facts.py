"""The facts that are gathered: of the processes of a lock server, of workers, and of the locks."""

from __future__ import annotations

from types import SimpleNamespace

import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.facts import (
    Facts,
    members_of,
)
from celery_dislock.servers.server import Member
from tests.unit.operating.checks.examples import facts, holder, lock


def refused(reason="NOPERM no"):
    error = StoreError("redis://h", reason)
    error.raw = redis.ResponseError(reason)
    return error


class TestMembers:
    def member(self, **replies):
        def send(command, *_arguments):
            reply = replies[command.decode()]
            if isinstance(reply, Exception):
                raise reply
            return reply

        site = SimpleNamespace(members=lambda: [Member("redis://h", send, None)])
        [one] = members_of(site)
        return one._replace(send=None)

    def test_what_it_refuses_is_not_known(self):
        """That is no outage."""
        one = self.member(TIME=refused(), INFO=refused("NOPERM INFO"))
        assert (one.away, one.no_info, one.clock) == ("", "NOPERM INFO", None)

    def test_a_cluster_without_a_slot_map_is_away(self):
        """No node told the slots, so there is nobody to ask."""

        def members():
            raise StoreError("redis+cluster://h", "no node tells the slots")

        [one] = members_of(SimpleNamespace(name="redis+cluster://h", members=members))
        assert one.away == "no node tells the slots"


class Overview:
    """Has the locks of the test."""

    def __init__(self, *states):
        self.states = states
        self.read = []

    def locks(self, failed):
        failed.append(StoreError("redis://b", "no answer in time"))
        yield from self.states

    def lock(self, name, most):
        self.read.append(name)
        return next(one for one in self.states if one.name == name)


def test_only_what_may_be_wrong_is_remembered(monkeypatch):
    """Ten thousand healthy locks cost no memory; lines are read, the longest first."""
    states = [
        lock(key="a", name="a", waiting=1),
        lock(key="b", name="b", waiting=2),
        lock(key="c", name="c", aside=1),
        lock(key="healthy", holders=[holder()]),
    ]
    overview = Overview(*states, StoreError("redis://a", "x"))
    monkeypatch.setattr(Facts, "overview", overview)
    known = facts()
    known.look(lambda one, _: bool(one.waiting or one.aside))
    assert [one.key for one in known.locks.suspects] == ["b", "a", "c"]
    assert overview.read == ["b", "a"]
    assert (known.locks.locks, known.locks.leases, known.locks.waiting) == (4, 1, 3)
    assert (len(known.locks.unread), len(known.locks.away)) == (1, 1)
