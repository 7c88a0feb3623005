"""One worker of one broker, as tests of parked tasks drive it, and all records of its line.

Nothing else in these tests knows how a request is made, what an answer is called, or how a record
is written.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from celery_dislock.config.terms import Terms
from celery_dislock.parking.answers import Done, Full, Later, Parked
from celery_dislock.parking.store import OVER, Bounds, Lines, Ticket
from celery_dislock.scripts import HAS_LEFT
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from tests.holding import name_of

__all__ = ["LOCK", "LONG", "TURN", "Bounds", "Broker", "Line", "Terms"]

LOCK = name_of("line")
INDEX = "dislock:lines:here"  # of the lines of the broker "here"
LONG = 1_000_000.0  # seconds: no such lease runs out by itself
TURN = 5  # seconds that leases of parked tasks last, and their first turn
REPLACES = Bounds(1, overflow="replace")
WORDS = {Granted: "granted", Conflict: "refused", Parked: "parked", Full: "full", Done: "done"}
WORDS[Later] = "later"


def owner_of(task, copy=1):
    return f"{task}@w:1/{copy}"


def message_of(task):
    return f"message of {task}".encode()


def sent(at):
    """Return a message that says when it was sent."""
    return b'1 {"sent":%d,"until":""}' % at


class Answer(str):
    """
    What a task is told that asks for its lock: granted, refused, parked, full or done.

    Attributes:
        place: In line, from 1; 0: none.
        holder: Who has the lock.
        replaced: The messages of those that lost their places, by task.
        told: Holders that were told to end.
        token: Of the lease.
    """

    __slots__ = ("holder", "place", "replaced", "token", "told")

    def __new__(cls, reply):
        answer = super().__new__(cls, WORDS[type(reply)])
        answer.place = getattr(reply, "place", 0)
        answer.holder = getattr(reply, "holder", {})
        replaced = getattr(reply, "replaced", {})
        answer.replaced = {short(ticket): message for ticket, message in replaced.items()}
        answer.told = getattr(reply, "told", ())
        (answer.token,) = getattr(reply, "tokens", (0,))
        return answer


class Broker:
    """What a worker has at one lock, and what it was given to publish; of a LuaServer, say."""

    def __init__(self, server, broker="here", lock=LOCK):
        self.published, self.lock = [], lock
        self.store = server.store(broker=broker, hand_over=self.published.extend)
        self.lines = Lines(self.store.lock_server, "dislock", broker, self.published.extend)

    def ask(self, task, /, copy=1, *, message=b"", marked=False, ttl=LONG, lock=None, **how):
        """Take the lock for this copy of the task's message, or claim its turn."""
        terms = Terms(**{name: how.pop(name) for name in Terms._fields if name in how})
        shown = Ticket(f"{task}:0:0", marked, message, terms=(terms,), **how)
        holder = json.dumps({"id": task})
        return self.lines.park([lock or self.lock], owner_of(task, copy), ttl, holder, shown)

    def park(self, task, /, copy=1, *, message=None, ttl=TURN, **terms):
        """As ask(), but it is put in line where it cannot have the lock."""
        message = message_of(task) if message is None else message
        return self.ask(task, copy, message=message, ttl=ttl, **terms)

    def line_up(self, *tasks, holder="first"):
        """Park tasks, and end the lease before them: the first has its turn."""
        for task in tasks:
            self.park(task)
        self.end(holder)

    def end(self, task, copy=1, **how):
        """End the lease of this copy, and the work of the task."""
        ending = self.ending(**{"ticket": f"{task}:0:0", **how})
        return self.store.release([self.lock], owner_of(task, copy), ending)

    def ending(self, ticket, **how):
        return Ending(ticket=ticket, **how)

    def sweep(self):
        return self.lines.sweep([LOCK])[LOCK]

    def keep(self, task):
        """Keep its turn, as a worker does in which its message waits for its rate_limit."""
        [kept] = self.lines.keep_turns([(LOCK, f"{task}:0:0")], within=1)
        return kept

    def leave(self, task, how=OVER, name=""):
        return self.lines.leave(self.lock, f"{task}:0:0", how, name) == HAS_LEFT

    def given(self):
        """Tell, once, which tasks were given to be published."""
        tasks = [short(turn.ticket) for turn in self.published]
        self.published.clear()
        return tasks


class Line(Broker):
    """A worker whose answers are words, and all records of the line."""

    def __init__(self, server, broker="here"):
        super().__init__(server, broker)
        self.client = server.client()

    def ask(self, task, /, copy=1, **terms):
        return Answer(super().ask(task, copy, **terms))

    def claim(self, task, /, copy=2, **terms):
        """Ask with the message that a turn has brought."""
        return self.ask(task, copy, marked=True, **terms)

    def run(self, task, /, copy=2, **terms):
        """Claim its turn, and end."""
        assert self.claim(task, copy, **terms) == "granted"
        self.end(task, copy)

    def wait(self, owner, place=LONG, ttl=LONG, **terms):
        """Let somebody take the lock who waits for it in a slot; return whether it was granted."""
        terms = {"terms": (Terms(**terms),)} if terms else {}
        answer = self.store.acquire([LOCK], owner, ttl, "{}", place=place, **terms)
        return isinstance(answer, Granted)

    def owners(self):
        """Return the owners of all leases."""
        return [one.owner for one in self.store.holders(LOCK)]

    def clear(self, task):
        """End what the process of a task had, which is dead."""
        return self.store.release_dead([LOCK], f"{task}@w:1/")

    def give_back(self, task):
        self.lines.give_back(LOCK, f"{task}:0:0")

    def listed(self):
        """Return the locks that are listed, with their numbers."""
        return self.lines.page(b"0", 100)[2]

    def swept(self):
        """Return how many are parked, whose end is to be told, and who claims no turns."""
        found = self.sweep()
        return found.parked, set(map(short, found.replaced)), list(map(short, found.unclaimed))

    def line(self):
        """Return the tasks that wait for their turn, and the owners that wait in a slot."""
        line = [one.decode() for one in self.client.zrange(f"{LOCK}:line", 0, -1)]
        return [short(one) if one[-1] == "#" else one for one in line]

    def records(self):
        """Read all records; the count of their bytes must be right."""
        client = self.client
        tickets = client.hgetall(f"{LOCK}:tickets")
        counted = tickets.pop(b"bytes", None)
        assert int(counted or 0) == sum(map(len, tickets.values()))
        assert (counted is None) == (not tickets)
        names = (name.decode() for name in client.keys("*") if b":done:" in name)
        marks = [name.partition(":done:")[2] for name in names]
        return Records(
            self.line(),
            {short(ticket): int(record.split()[2]) for ticket, record in tickets.items()},
            {short(one): at for one, at in client.zrange(f"{LOCK}:handed", 0, -1, withscores=True)},
            *(sorted(map(short, client.hkeys(f"{LOCK}:{of}"))) for of in ("running", "replaced")),
            {short(ticket): kept for ticket, kept in client.hgetall(f"{LOCK}:aside").items()},
            {short(one) for one in marks if "@" not in one},
            {one for one in marks if "@" in one},
        )

    def record_of(self, task):
        """Return the record of a task that has not claimed its turn."""
        return self.client.hget(f"{LOCK}:tickets", f"{task}:0:0")

    def spoil(self, task, begin=b"garbage \0\n\xff"):
        """Write something of the same length in the place of a record; return that."""
        record = begin + self.record_of(task)[len(begin) :]
        self.client.hset(f"{LOCK}:tickets", f"{task}:0:0", record)
        return record

    def lose(self, task, *, place=True):
        """Lose the record of a task, and its *place* in line or its turn, as a failover does."""
        client, ticket = self.client, f"{task}:0:0"
        size = client.hstrlen(f"{LOCK}:tickets", ticket)
        client.hdel(f"{LOCK}:tickets", ticket)
        client.hincrby(f"{LOCK}:tickets", "bytes", -size)
        if place:
            client.hdel(LOCK, f"{ticket}#")
            client.zrem(f"{LOCK}:line", f"{ticket}#")
            client.zrem(f"{LOCK}:handed", ticket)
        if client.hlen(f"{LOCK}:tickets") == 1:
            client.delete(f"{LOCK}:tickets")


class Records(NamedTuple):
    """All that is written of the parked tasks of the lock, by task."""

    line: list[str]  # tasks, and the owners that wait in a slot, in their order
    turns: dict[str, int]  # how often those were given their turn that have not claimed it
    until: dict[str, float]  # UNIX time in ms: when a turn ends
    running: list[str]
    replaced: list[str]
    aside: dict[str, bytes]
    done: set[str]
    over: set[str]  # deliveries that are over


def short(ticket):
    """Return the task's name of a ticket."""
    name = ticket.decode(errors="replace") if isinstance(ticket, bytes) else ticket
    return name.partition(":")[0]


def left(server):
    """Return the keys that are there, but for marks of work, the mean of bodies, and the index."""
    names = server.names() - {INDEX, f"{LOCK}:lasted"}
    return {key for key in names if f"{LOCK}:done:" not in key}


def snapshot(server):
    """Return all that is there, and about when it ends."""
    return server.contents(), {name: round(ttl / 60_000) for name, ttl in server.ttls().items()}
