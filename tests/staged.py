"""Locks that a test makes up: their records, as the scripts write them, on a server of bare Lua."""

import json
from fnmatch import fnmatchcase

from celery_dislock.config.terms import LIMIT_MOST
from celery_dislock.messages.message import Message
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.server import Member
from celery_dislock.servers.view import Holder, LockState, ReservationState
from celery_dislock.servers.waiters import Waiter
from tests.driven import LockServer, new_app
from tests.holding import name_of

FAR = 9 * 10**13  # Redis TIME in ms, of 14 digits: long after each test
KEPT_MS = 30 * 86_400_000  # of what beats have sent; see _names.lua
STATES = {"being sent": "s", "waiting": "w", "running": "r", "ended": "d"}
RESERVED = ReservationState("id-9", "waiting", 3.0, 20.0, "5eed", 7)


def holder(number=1, **changes):
    """Make a lease of shop.export; who it is in words follows from the rest."""
    known = {
        "owner": f"id-{number}@celery@w1:7/ab.{number}",
        "token": number,
        "mode": "exclusive",
        "held": 60.0 + number,
        "acquired_at": 1.8e9,
        "remaining": 29.0,
        "renewed": 1.0,
        "expiring": False,
        "turn": False,
        "who": "",
        "task": "shop.export",
        "id": f"id-{number}",
        "worker": "celery@w1",
        "pid": 7,
        "host": "w1",
        "thread": None,
    }
    return Holder(**{**known, **changes})


def place(number=1, **changes):
    """Make a place of a parked shop.pay."""
    known = {
        "place": number,
        "waiting": 5.0,
        "mode": "exclusive",
        "parked": True,
        "ticket": f"parked-{number}:0:0",
        "turns": 0,
        "who": "",
        "task": "shop.pay",
        "id": f"parked-{number}",
        "args": "('4111-1111',) {}",
        "exchange": "",
        "routing_key": "celery",
    }
    return Waiter(**{**known, **changes})


def lock(key="k", **changes):
    """Make a lock that nobody holds."""
    known = dict.fromkeys(LockState._fields)
    known |= dict.fromkeys(("holders", "line", "turns"), ())
    known |= {"waiting": 0, "aside": 0, "limit_note": "", "limit_differs": 0}
    return LockState(**{**known, "key": key, "name": f"dislock:{{{key}}}", **changes})


class Staged(LockServer):
    """
    A lock server with the locks that a test makes up.

    Attributes:
        error: Raised in place of each answer.
        info: What it tells of itself.
        broker: Broker of the parked tasks.
        scans: How often the names of all keys were read.
        looks: Names of the locks that were looked at one by one.
    """

    name = "redis://locks.example.com:6379/0"
    min_replicas = 0

    def __init__(self):
        super().__init__()
        self.error = None
        self.info = {"redis_version": "8.0.0", "role": "master"}
        self.broker = "here"
        self.scans = 0
        self.looks = []
        self._known = set()

    @property
    def overview(self):
        """What reads it."""
        return Overview(self, "dislock")

    def run(self, script, keys, *arguments):
        """Run a script."""
        self.looks += keys
        return super().run(script, keys, *arguments)

    def send(self, *command):
        """Run a command."""
        name = command[0].decode() if isinstance(command[0], bytes) else command[0]
        if name == "SCAN" and self.error is None:
            self.scans += 1  # in one step
            pattern = str(command[3])
            return [b"0", [one.encode() for one in self.names() if fnmatchcase(one, pattern)]]
        if name == "INFO" and self.error is None:
            return "\n".join(f"{field}:{value}" for field, value in self.info.items()).encode()
        return super().send(name, *command[1:])

    def _ask(self, *request):
        if self.error is not None:
            raise self.error
        return super()._ask(*request)

    def members(self):
        """Return itself."""
        return [Member(self.name, self.send, None)]  # type: ignore[arg-type]

    def senders(self):
        """Return what sends it a command."""
        return [self.send]

    def watchers(self):
        """Return none."""
        return []

    # Records.

    def put(self, *states):
        """Write the records of these locks, in place of what there is of them."""
        for state in states:
            if state.name in self._known:
                self.take_away(state)
            self._known.add(state.name)
            for one in state.holders:
                self._lease(state.name, one)
            line = list(state.line)
            line += [
                place(nth, parked=False, task="t", id=str(nth), ticket="", waiting=0.0)
                for nth in range(len(line) + 1, (state.waiting or 0) + 1)
            ]
            for nth, waiter in enumerate(line):
                self._place(state, nth, waiter)
            for waiter in state.turns:
                super().send("ZADD", f"{state.name}:handed", self.now_ms + 20_000, waiter.ticket)
                self._ticket(state, waiter)
            for nth in range(state.aside):
                super().send("HSET", f"{state.name}:aside", f"aside-{nth}:0:0", "?")
            self._beside(state)

    def take_away(self, state):
        """Delete all records of a lock."""
        ends = ("", "line", "places", "tickets", "handed", "aside", "unique", "limit", "beat")
        ends += ("rate", "starts")
        super().send("DEL", *(f"{state.name}:{end}".rstrip(":") for end in ends))

    def damage(self, key):
        """Write something else over the leases of a lock."""
        super().send("SET", f"dislock:{{{key}}}", "?")

    def _since(self, seconds):
        return self.now_ms - round(seconds * 1000)

    def _lease(self, name, one):
        about = {"superseded": one.superseded}
        about |= {field: getattr(one, field) for field in ("task", "id", "worker", "pid", "host")}
        about |= {"thread": one.thread, "parked": one.turn or None}
        about["waits"] = one.waits and name_of(one.waits)
        about["timeout"] = None if one.renewed is None else one.renewed + one.remaining
        written = json.dumps({field: value for field, value in about.items() if value is not None})
        ends, mode = self._since(-one.remaining), one.mode[0].replace("e", "x")
        mode += f"{one.cost}" * (one.cost > 1) + ("" if one.spent is None else f":{one.spent}")
        record = f"1 {ends} {one.token} {self._since(one.held)} {mode} {written}"
        super().send("HSET", name, f"{'~' * one.expiring}{one.owner}", record)

    def _place(self, state, nth, one):
        name = state.name
        member = f"{one.ticket}#" if one.parked else f"waiter-{nth:09}"
        if one.beside:
            member = f"{len(one.beside)}/{one.beside}{member}#"
        joined = self._since(one.waiting) * 1000 + nth
        super().send("ZADD", f"{name}:line", joined, member)
        if one.parked:
            self._ticket(state, one)
            return
        about = {"thread": one.thread} if one.thread else {"task": one.task, "id": one.id}
        about |= {"worker": "web", "pid": 3}
        record = f"1 {FAR} 30000 {_terms(state, one)} {json.dumps(about)}"
        super().send("HSET", f"{name}:places", member, record)

    def _ticket(self, state, one):
        headers = {"task": one.task, "id": one.id, "argsrepr": one.args, "dislock": {"v": 1}}
        to = str(one.exchange), str(one.routing_key)
        message = Message(*to, headers, "application/json", "utf-8", {}, True, b"[[], {}, {}]")
        joined, terms = self._since(one.waiting) * 1000, _terms(state, one)
        broker, written = one.broker or self.broker, message.to_bytes()
        if one.stations:
            terms = json.dumps([[name_of(key), terms, str(joined)] for key in one.stations])
        head = f"1 {joined} {one.turns} 60000 {broker} {len(written)} {terms} "
        record, beside = head.encode() + written, one.beside or state.name
        super().send("HSET", f"{beside}:tickets", one.ticket, record)

    def _beside(self, state):
        if (kept := state.reservation) is not None:
            since, ends = self._since(kept.since), self._since(-kept.remaining)
            record = f"1 {STATES[kept.state]} {ends} {kept.id} {since} {since} nonce {kept.number}"
            record += f" 1 {kept.mark} {kept.number} {kept.number} 0 {ends} -"
            super().send("SET", f"{state.name}:unique", record)
        if state.limit is not None:
            since = self._since(state.limit_age or 0.0)
            since = since if state.limit_since is None else round(state.limit_since * 1000)
            self._set(
                state.name, "limit", state.limit, since, state.limit_remaining, state.limit_note
            )
        if state.rate is not None:
            self._rate(state.name, state.rate)
        if state.ticked is not None:
            super().send("HSET", f"{state.name}:beat", "hourly", "1 1 1 -")
            ttl = KEPT_MS - round(state.ticked * 1000)
            super().send("PEXPIRE", f"{state.name}:beat", ttl)

    def _set(self, name, what, value, since, lasts, note):
        until = 0 if lasts is None else self._since(-lasts)
        line = f"2 {what} {value} {since} {until} {' '.join(note.splitlines())}\n".encode()
        before = super().send("GET", f"{name}:limit") or b""
        super().send("SET", f"{name}:limit", before + line)

    def _rate(self, name, one):
        since = self._since(one.age or 0.0)
        if one.is_set and one.rate:
            self._set(name, "rate", one.rate.word, since, one.remaining, one.note)
        if one.held_back:
            self._set(name, "back", "-", since, one.held_back, one.back_note)
        if one.rate is not None and (one.early or not one.is_set) and not one.held_back:
            start = self._since(one.rate.window - one.early) * 1000
            starts = [start] * one.rate.most if one.early else [start]
            kept = f"1 {one.rate.most} {one.rate.window * 1000:.0f}"
            super().send("RPUSH", f"{name}:starts", *starts, kept)


def _terms(state, one):
    """Write the terms of a place; the rate is the code's, or seems to be."""
    rate = state.rate and state.rate.rate
    word = f":{rate.word}" if rate else ""
    cost = f"*{one.cost}" if one.cost > 1 else ""
    return f"{one.mode[0].replace('e', 'x')}:{one.limit or LIMIT_MOST}{word}{cost}"


def reach(patch, server):
    """Let each lock server that a process makes from now on be this one."""
    patch.setattr("celery_dislock.servers.store.server_for", lambda *_, **__: server)


def make_app(server):
    """Make an app whose locks are there while :func:`reach` holds; its broker is in memory."""
    app = new_app()
    app.conf.dislock_url = server.name
    server.broker = runtime_of(app).process.store.broker
    return app
