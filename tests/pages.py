"""The page with locks that a test makes up, served to a browser."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from celery import Celery
from waitress import wasyncore
from waitress.server import create_server
from werkzeug.test import Client, TestResponse

from celery_dislock.operating.locks import AppLocks
from celery_dislock.operating.web import Page
from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter
from celery_dislock.tasks.actions import Actions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.exceptions import StoreError

LIMIT = 10.0  # seconds for a server to end
ORIGIN = "http://127.0.0.1:8765"


def holder(number: int = 1, **changes: Any) -> Holder:
    """Make a lease of shop.export."""
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
        "who": f"shop.export[id-{number}] on celery@w1 (pid 7)",
        "task": "shop.export",
        "id": f"id-{number}",
        "worker": "celery@w1",
        "pid": 7,
        "host": "w1",
        "thread": None,
    }
    return Holder(**{**known, **changes})


def place(number: int = 1, **changes: Any) -> Waiter:
    """Make a place of a parked shop.pay."""
    known = {
        "place": number,
        "waiting": 5.0,
        "mode": "exclusive",
        "parked": True,
        "ticket": f"parked-{number}:0:0",
        "turns": 0,
        "who": f"shop.pay[parked-{number}]",
        "task": "shop.pay",
        "id": f"parked-{number}",
        "args": "('4111-1111',) {}",
    }
    return Waiter(**{**known, **changes})


def lock(key: str = "k", **changes: Any) -> LockState:
    """Make a lock that nobody holds."""
    known: dict[str, Any] = dict.fromkeys(LockState._fields)
    known |= {
        "key": key,
        "name": f"dislock:{{{key}}}",
        "holders": [],
        "waiting": 0,
        "line": [],
        "turns": [],
        "aside": 0,
        "limit_note": "",
    }
    return LockState(**{**known, **changes})


RESERVED = ReservationState("id-9", "waiting", 3.0, 20.0, "5eed", 7)


class FakeOverview:
    """
    What a lock server knows.

    Attributes:
        known: The locks by name, or the error of one.
        error: Raised instead of an answer.
        patterns: By which all names were asked for.
        asked: The locks that were looked at one by one: name, first place, number of places.
    """

    def __init__(self) -> None:
        self.known: dict[str, LockState | StoreError] = {}
        self.error: Exception | None = None
        self.patterns: list[str] = []
        self.asked: list[tuple[str, int, int]] = []

    def put(self, *states: LockState) -> None:
        self.known.update({state.name: state for state in states})

    def names(self, pattern="*", failed=None):
        self.patterns.append(pattern)
        self._answer()
        names = list(self.known)
        for first in range(0, len(names), 100):
            yield names[first : first + 100]

    def look(self, names, most=0):
        self._answer()
        return [self.known[name] for name in names]

    def lock(self, name, first=0, most=20):
        self.asked.append((name, first, most))
        self._answer()
        state = self.known.get(name) or lock(name=name, key=name.partition("{")[2][:-1])
        if isinstance(state, Exception):
            raise state
        return state._replace(line=state.line[first : first + most])

    def _answer(self):
        if self.error is not None:
            raise self.error


class FakeActions(Actions):
    """
    Notes what was done.

    Attributes:
        answer: Whether there was something to do it to.
        before: The limit that there was.
        left: The lease that a task has which was told to end.
        aside: What is put back, with what is wrong with it.
        error: Raised instead of an answer.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.answer = True
        self.before: int | None = None
        self.left: Holder | None = None
        self.aside: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def _note(self, *done: Any) -> bool:
        if self.error is not None:
            raise self.error
        self.done.append(done)
        return self.answer

    def free(self, name, owner, token):
        return self._note("free", name, owner, token)

    def end_reservation(self, name, shown):
        return self._note("unreserve", name, shown.id, shown.mark, shown.number)

    def terminate(self, holder, *, signal="TERM"):
        self._note("terminate", holder.id, signal)

    def _wait_until_ended(self, name, _holder, seconds):
        self._note("wait", name, seconds)
        return self.left

    def drop(self, name, ticket):
        return self._note("drop", name, ticket)

    def put_back(self, name, ticket=""):
        self._note("put back", name, ticket)
        yield from self.aside

    def limit(self, name, limit, *, seconds=None, note=""):
        self._note("limit", name, limit, seconds, note)
        return self.before


class StagedLocks(AppLocks):
    """Reads a made-up lock server, and only notes what is done to its locks."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.staged = FakeOverview()
        self.noted = FakeActions()

    @property
    def overview(self):
        return self.staged

    @property
    def actions(self):
        return self.noted


def ann(_environ: Any) -> str:
    """Say that ann asks."""
    return "ann"


def staged(**options: Any) -> tuple[Page, FakeOverview, FakeActions]:
    """Make a page, the lock server that it reads, and what it does to the locks there."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = "redis://locks.example.com:6379/0"
    page = Page(app, **{"user": ann, "allow_actions": True, **options})
    locks = page._locks = StagedLocks(app)
    return page, locks.staged, locks.noted


class Visitor(Client):
    """A browser on this machine: it keeps cookies, and sends forms as the page does."""

    def open(self, *args: Any, **kwargs: Any) -> TestResponse:
        kwargs.setdefault("buffered", True)  # a browser reads to the end
        kwargs.setdefault("base_url", ORIGIN)
        kwargs.setdefault("environ_base", {"REMOTE_ADDR": "127.0.0.1"})
        return super().open(*args, **kwargs)

    def act(self, path: str, **form: str) -> TestResponse:
        return self.post(path, data=form, headers={"Origin": ORIGIN})


@contextmanager
def serving(application: Any) -> Iterator[str]:
    """Serve an application on a free port of this machine; gives its address."""
    server = create_server(application, host="127.0.0.1", port=0, threads=4, ident=None)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}/"
    finally:
        # In the server's own thread: its loop ends when nothing is left in its map.
        server.trigger.pull_trigger(lambda: wasyncore.close_all(server._map))
        thread.join(LIMIT)
        server.task_dispatcher.shutdown()
