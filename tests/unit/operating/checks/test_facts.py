"""The facts that are gathered: of the processes of a lock server, of workers, and of the locks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import workers
from celery_dislock.operating.checks.facts import (
    ROUND_TRIPS,
    Facts,
    Fleet,
    Member,
    members_of,
    understood,
)
from celery_dislock.servers.view import ReservationState
from tests.unit.operating.checks.examples import described, facts, holder, lock


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

    @pytest.mark.parametrize("save", [[b"save", b"3600 1"], {b"save": b"3600 1"}])
    def test_it_is_asked_for_clock_settings_and_time(self, save):
        """Eleven round trips are timed, and the clocks compared."""
        one = self.member(TIME=[b"100", b"500000"], INFO=b"# S\r\nrole:master\r\n", CONFIG=save)
        assert len(one.round_trips) == ROUND_TRIPS
        assert one.clock < -1e9
        assert (one.info, one.save) == ({"role": "master"}, "3600 1")

    def test_one_that_does_not_answer_is_asked_nothing_more(self):
        """It is away."""
        away = self.member(TIME=StoreError("redis://h", "no answer in time"))
        assert away == Member("redis://h", away="no answer in time")

    def test_what_it_refuses_is_not_known(self):
        """That is no outage."""
        one = self.member(TIME=refused(), INFO=refused("NOPERM INFO"), CONFIG=refused())
        assert (one.away, one.no_info, one.save, one.clock) == ("", "NOPERM INFO", None, None)

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

    def locks(self, failed):
        failed.append(StoreError("redis://b", "no answer in time"))
        yield from self.states

    def lock(self, name, most):
        return next(one for one in self.states if one.name == name)


class TestLocks:
    def test_only_what_may_be_wrong_is_remembered(self, monkeypatch):
        """Ten thousand healthy locks cost no memory."""
        old = ReservationState("id-1", "waiting", 4000.0, 10.0, "m", 0)
        suspects = {
            "mute": {"holders": [holder()]},
            "old": {"reservation": old},
            "line": {"waiting": 2},
            "aside": {"aside": 1},
            "paused": {"limit": 0},
            "differs": {"limit_differs": 1},
        }
        healthy = {
            "answers": {"holders": [holder("w1@here")]},
            "python": {"holders": [holder("laptop")]},  # plain Python on that host
            "runs": {"reservation": old._replace(state="running")},
            "ended": {"reservation": old._replace(state="ended")},  # as "expiry" says
            "young": {"reservation": old._replace(since=1.0)},
            "gone": {},  # of which only numbers are kept
        }
        states = [
            lock(key=key, name=key, **given) for key, given in {**suspects, **healthy}.items()
        ]
        overview = Overview(*states, StoreError("redis://a", "x"))
        monkeypatch.setattr(Facts, "overview", overview)
        seen = facts()
        seen.look()
        assert [one.key for one in seen.locks.suspects] == list(suspects)
        assert [one.key for one in seen.locks.lines] == ["line"]
        assert (seen.locks.locks, seen.locks.leases, seen.locks.waiting) == (11, 3, 2)
        assert (len(seen.locks.unread), len(seen.locks.away)) == (1, 1)

    @pytest.mark.parametrize(
        ("tasks", "old"),
        [
            ({}, 1800.0),
            ({"t": {"lock_unique_for": 20.0}}, 1800.0),  # it reserves nothing
            ({"t": {"lock_unique_until": "start"}}, 1800.0),
            ({"t": {"lock_unique_until": "end", "lock_unique_for": 20.0}}, 10.0),
        ],
    )
    def test_when_a_reservation_is_old(self, tasks, old):
        """After half of the shortest lock_unique_for that is known."""
        waiting = ReservationState("id-1", "waiting", old + 1, 10.0, "m", 0)
        known = facts(ours=described(tasks=tasks))
        assert known.is_old(waiting)
        assert not known.is_old(waiting._replace(since=old - 1))


class TestUnderstood:
    def test_an_answer_of_this_version_stays_what_it_is(self):
        """As far as the checks use it."""
        assert understood(json.loads(json.dumps(described()))) == described()

    @pytest.mark.parametrize("answer", [None, [], "x", {}, {"error": "KeyError"}, {"leases": 7}])
    def test_what_is_no_answer(self, answer):
        """An older version, a worker without the plugin, or no reply at all."""
        assert understood(answer) is None

    @pytest.mark.parametrize(
        "strange",
        [
            {"leases": [7, {}, {"key": 7, "held": [], "overdue": "x"}, {"held": 1, "overdue": 1}]},
            {"leases": [], "tasks": ["export"], "warnings": "x", "version": 7, "server": {}},
            {"leases": [], "tasks": {"export": 7, "pay": {"lock_key": {"a": [1]}}}},
            {"leases": [], "errors": "many", "unavailable": 7},
        ],
    )
    def test_an_answer_of_a_stranger_is_no_reason_to_stop(self, strange):
        """Each check copes with its answer."""
        fleet = Fleet({"w1": understood(strange), "w2": described()}, {})
        assert [one for check in workers.TABLE for one in check.findings(facts(fleet=fleet))]
