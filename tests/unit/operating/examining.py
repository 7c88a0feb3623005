"""What the tests of ``doctor`` share: the command, the workers that answer it, and lock servers."""

import json
from importlib.metadata import version
from pathlib import Path

from redis import ResponseError

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.server import Member
from tests.commands import AWAY, FOUND

MASTER = {"role": "master", "aof_enabled": "1"}
ONLINE = {"slave0": "ip=127.0.0.1,port=6380,state=online,offset=14,lag=0"}
EXPORT = {"lock_key": "export:<n>"}


class Doctor:
    """
    Runs the command, and answers for the workers.

    Attributes:
        answers: How each worker describes its locks.
        error: Raised by the broker.
        at: The lock server.
    """

    def __init__(self, dislock, at):
        self._dislock = dislock
        self.at = at
        self.answers = {"w1": self.described()}
        self.error = None

    def described(self, lease=None, **given):
        """How a worker describes its locks."""
        held = {"key": "export:7", "held": True, "overdue": False, **(lease or {})}
        known = {"version": version("celery-dislock"), "enabled": True, "locks": True}
        known |= {"server": self.at.name, "prefix": "dislock", "no_server": None}
        known |= {"tasks": {"export": EXPORT}, "warnings": [], "unavailable": None, "errors": 0}
        return {**known, "leases": [held], **given}

    def broadcast(self, asked, **_how):
        if self.error is not None:
            raise self.error
        if asked == "ping":
            return [{name: {"ok": "pong"}} for name in self.answers]
        return [{name: answer} for name, answer in self.answers.items()]

    def declare(self, name="export", **options):
        """Have a task here."""

        @self._dislock.app.task(base=SingletonTask, name=name, shared=False, **options)
        def task(n=1): ...

    def told(self):
        """All findings; the exit code says how bad they are."""
        answer = self._dislock("doctor", "--json", "--timeout", "0.01")
        report = json.loads(answer.stdout)
        assert answer.exit_code == (AWAY if report["away"] else FOUND * report["serious"])
        return report["findings"]

    def set(self, **conf):
        """Change settings of the app."""
        self._dislock.app.conf.update(conf)
        vars(runtime_of(self._dislock.app)).pop("settings", None)

    def found(self, *checks):
        """Check, level and text of what is found and is not ok, by these checks."""
        return [
            (one["check"], one["level"], one["what"])
            for one in self.told()
            if one["level"] != "ok" and (not checks or one["check"] in checks)
        ]


def member(server, name, info, ahead=0.0):
    """Make a process of the lock server; no info: it is away; text: it refuses INFO."""

    def send(command):
        if info is None:
            raise StoreError(name, "no answer in time")
        if command == b"TIME":
            seconds, micros = map(int, server.send("TIME"))
            return [seconds + int(ahead), micros + round(ahead % 1 * 1e6)]
        if isinstance(info, str):
            error = StoreError(name, info)
            error.raw = ResponseError(info)
            raise error
        return "\n".join(f"{field}:{value}" for field, value in info.items()).encode()

    return Member(name, send, None)


def told_in(name):
    """Return what is told in each case, line by line, as a file of texts has it."""
    blocks = (Path(__file__).parent / "texts" / name).read_text("utf-8").strip().split("\n\n")
    return {case: lines for case, *lines in map(str.splitlines, blocks)}
