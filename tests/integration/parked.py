"""One worker of one broker, as tests of parked tasks drive it by its store and its lines."""

from __future__ import annotations

import json

from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.requests import Ending
from tests.holding import name_of

LOCK = name_of("line")
LONG = 1_000_000.0  # seconds: no such lease runs out by itself
TURN = 5  # seconds that leases of parked tasks last, and their first turn


def owner_of(task, copy=1):
    return f"{task}@w:1/{copy}"


def message_of(task):
    return f"message of {task}".encode()


class Broker:
    """All that a worker has, and what it was given to publish; of a LuaServer or of its like."""

    def __init__(self, server, home="here"):
        self.published = []
        self.store = server.store(home=home, hand_over=self.published.extend)
        self.lines = Lines(self.store.lock_server, "dislock", home, self.published.extend)

    def ask(self, task, copy=1, *, message=b"", marked=False, ttl=LONG, lock=LOCK, **terms):
        """Take the lock for this copy of the task's message, or claim its turn."""
        shown = Ticket(f"{task}:0:0", f"{task}@", marked, message, **terms)
        return self.lines.park(lock, owner_of(task, copy), ttl, json.dumps({"id": task}), shown)

    def park(self, task, copy=1, *, message=None, ttl=TURN, **terms):
        """As ask(), but it is put in line where it cannot have the lock."""
        message = message_of(task) if message is None else message
        return self.ask(task, copy, message=message, ttl=ttl, **terms)

    def end(self, task, copy=1):
        return self.store.release([LOCK], owner_of(task, copy), Ending(ticket=f"{task}:0:0"))

    def sweep(self):
        return self.lines.sweep([LOCK])[LOCK]

    def leave(self, task):
        return self.lines.leave(LOCK, f"{task}:0:0")

    def withdraw(self, task, delivery=""):
        return self.lines.withdraw(LOCK, f"{task}:0:0", delivery)

    def given(self):
        """Tell, once, which tasks were given to be published."""
        tasks = [turn.ticket.partition(":")[0] for turn in self.published]
        self.published.clear()
        return tasks
