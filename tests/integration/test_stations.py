"""Tasks of several keys in line: they pass one lock after the other, and keep what they passed.

The real scripts, in this process, on a clock that the tests drive.
"""

import json

import pytest

from celery_dislock.config.terms import Terms
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Bounds, Lines, Ticket
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from tests.holding import name_of
from tests.integration.lua_server import LuaServer

API = name_of("api")
TTL = 30.0


def tenant(name):
    return name_of(f"tenant:{name}")


class Fleet:
    """Workers of one broker: what they ask for, and what they were given to publish."""

    def __init__(self, server):
        self.server = server
        self.out = []
        self.store = server.store(home="here", hand_over=self._publish)
        self.lines = Lines(self.store.lock_server, "dislock", "here", self._publish)
        self.locks = {}
        self.times = 0

    def _publish(self, turns):
        self.out += [turn.ticket.partition(":")[0] for turn in turns]

    def ask(self, task, locks, *terms, marked=False, message=b"", bounds=None):
        self.times += 1
        ticket = Ticket(
            f"{task}:0:0",
            marked,
            message,
            terms=terms or (Terms(),),
            bounds=bounds or Bounds(),
        )
        owner, holder = f"{task}@w:1/{self.times}", json.dumps({"id": task})
        answer = self.lines.park(locks, owner, TTL, holder, ticket)
        if isinstance(answer, Granted):
            self.locks[task] = answer.locks, owner
        return answer

    def send(self, task, locks, *terms, **how):
        """A worker gets the task's message, and runs or parks it; return the answer."""
        answer = self.ask(task, locks, *terms, **how)
        if type(answer) is Conflict:
            message = b'1 {"headers":{"dislock":{"v":1}}}'
            answer = self.ask(task, locks, *terms, message=message, **how)
        return answer

    def claim(self, task, locks=None, *terms):
        """A worker gets the message of a turn."""
        return self.ask(task, locks or self.locks_of(task), *terms, marked=True)

    def locks_of(self, task):
        return self.locks.get(task, ([tenant(task[0])],))[0]

    def end(self, task):
        locks, owner = self.locks.pop(task)
        return self.store.release(locks, owner, Ending(ticket=f"{task}:0:0"))

    def given(self):
        """Tell, once, who was published."""
        out, self.out = self.out, []
        return out

    def run_all(self):
        """Claim and end what is out, until nothing is; return the order."""
        ran = []
        while given := self.given():
            for task in given:
                assert isinstance(self.claim(task), Granted), task
                ran.append(task)
            for task in given:
                self.end(task)
        return ran

    def owners(self, lock):
        return [one.owner for one in self.store.holders(lock)]


@pytest.fixture
def server():
    return LuaServer()


@pytest.fixture
def fleet(server):
    return Fleet(server)


TWO = Terms(), Terms(limit=2)


def of(task):
    """Return the locks of a task: its tenant's, and the API's."""
    return [tenant(task[0]), API]


def test_a_task_passes_its_locks_and_runs(fleet):
    """It waits for its tenant, then for the API, and keeps the first meanwhile."""
    assert isinstance(fleet.send("a1", of("a1"), *TWO), Granted)
    assert isinstance(fleet.send("b1", of("b1"), *TWO), Granted)
    parked = fleet.send("a2", of("a2"), *TWO)
    assert (type(parked), parked.key, parked.place) == (Parked, "tenant:a", 1)
    parked = fleet.send("c1", of("c1"), *TWO)
    assert (type(parked), parked.key, parked.place) == (Parked, "api", 1)
    assert fleet.owners(tenant("c")) == ["c1:0:0#"]

    fleet.end("a1")  # a2 comes behind c1, which has its turn
    assert fleet.given() == ["c1"]
    assert fleet.owners(tenant("a")) == ["a2:0:0#"]
    granted = fleet.claim("c1")
    assert (granted.locks, len(granted.tokens)) == ((tenant("c"), API), 2)
    fleet.end("b1")
    assert fleet.run_all() == ["a2"]
    fleet.end("c1")
    fleet.server.advance(1)
    assert not [
        name for name in fleet.server.names() if ":done:" not in name and "lines" not in name
    ]


def test_a_tenant_waits_in_its_own_line(fleet):
    """The twenty of A are not in front of the three of B; each has its turn at the API."""
    tasks = [f"a{n}" for n in range(20)] + [f"b{n}" for n in range(3)]
    for task in tasks:
        fleet.send(task, of(task), *TWO)
    assert sorted(fleet.locks) == ["a0", "b0"]
    fleet.end("a0")
    fleet.end("b0")
    ran = fleet.run_all()
    assert sorted(ran) == sorted(set(tasks) - {"a0", "b0"})
    assert ran.index("b2") < 5
