"""The facts that are gathered: of the processes of a lock server, of workers, and of the locks."""

from __future__ import annotations

from types import SimpleNamespace

import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.facts import members_of
from celery_dislock.operating.checks.troubles import judged
from celery_dislock.operating.site import Site
from tests.pages import FakeOverview, lock
from tests.unit.operating.checks.examples import facts, holder, place


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

        site = SimpleNamespace(members=lambda: [("redis://h", send)])
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


class Overview(FakeOverview):
    """One server of several does not answer."""

    def names(self, _pattern, failed):
        failed.append(StoreError("redis://b", "no answer in time"))
        yield list(self.known)


def test_only_what_may_be_wrong_is_remembered():
    """Ten thousand healthy locks cost no memory; lines are read, the longest first."""
    overview = Overview()
    overview.put(
        lock("a", waiting=1, line=[place()]),
        lock("b", waiting=2, line=[place()]),
        lock("c", aside=1),
        lock("healthy", holders=[holder()]),
    )
    overview.known["dislock:{away}"] = StoreError("redis://a", "x")
    known = facts(site=Site(overview, "dislock"))
    known.look(judged)
    assert [one.key for one in known.locks.suspects] == ["b", "a", "c"]
    assert overview.asked == [("dislock:{b}", 0, 50), ("dislock:{a}", 0, 50)]
    assert (known.locks.locks, known.locks.leases, known.locks.waiting) == (4, 1, 3)
    assert known.locks.of_tasks
    assert (len(known.locks.unread), len(known.locks.away)) == (1, 1)
