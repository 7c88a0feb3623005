"""
Count what a journey through the package touches: modules, functions, and changes of module.

    make road

Each journey runs in this process against a real server, through Celery's own worker request and
tracer, once to warm up and then once under ``sys.setprofile``.  Only this package's Python code is
counted.  A change of module is a call from one of its modules into another.

The figures are exact, and depend neither on the machine nor on the version of Python.  They tell
how much somebody has to read who wants to follow a command from a task to its socket; what it costs
is for the other benchmarks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery
from kombu.utils.imports import symbol_by_name

import celery_dislock
from celery_dislock import Dislock, SingletonTask
from celery_dislock.locks.channel import TRACING
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from celery_dislock.locks.reentrant import ReentrantLock

PACKAGE = os.path.dirname(celery_dislock.__file__) + os.sep  # noqa: PTH120 -- compared with file names
GOALS = {  # modules and functions
    "a locked task, its lock free": (17, 70),
    "dislock.lock(key).acquire()": (11, 31),
    "lock.release()": (8, 22),
    "unique delay(), new": (11, 36),
    "a task is parked": (18, 75),
    "its turn: claim, body, release": (19, 85),
}
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # no functions from Python 3.12 on
WITHIN = 10.0  # seconds for a message to come


class Passed(NamedTuple):
    """
    What one journey has passed.

    Attributes:
        modules: The modules, in the order in which they were first entered.
        functions: How many functions and methods.
        changes: How often one module was left for another.
    """

    modules: list[str]
    functions: int
    changes: int


class Tracer:
    """Record the functions of the package that this thread calls."""

    def __init__(self) -> None:
        self._callers: list[CodeType] = []
        self._called: list[CodeType] = []
        self._changes = 0

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        """See ``sys.setprofile``."""
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        if event == "call":
            if self._callers and self._callers[-1].co_filename != code.co_filename:
                self._changes += 1
            self._callers.append(code)
            self._called.append(code)
        elif event == "return" and self._callers:
            self._callers.pop()

    def passed(self) -> Passed:
        """Return what was passed."""
        modules = list(dict.fromkeys(map(module_of, self._called)))
        return Passed(modules, len(set(self._called)), self._changes)


def module_of(code: CodeType) -> str:
    """Return the module of a function, without the package's name."""
    return code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")


def passed_by(journey: Callable[[], object]) -> Passed:
    """Make a journey, and return what it has passed."""
    tracer = Tracer()
    sys.setprofile(tracer)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return tracer.passed()


class InProcess:
    """A pool that runs what it is given, in this thread, with Celery's tracer; traced on demand."""

    def __init__(self) -> None:
        self.traces = False
        self.passed: Passed | None = None

    def apply_async(self, target: Callable[..., Any], args: Any = (), **_callbacks: Any) -> None:
        """Run it."""
        if self.traces:
            self.passed = passed_by(lambda: target(*args))
        else:
            target(*args)


class Shop:
    """An app with tasks of each kind, and a worker's way of running their messages."""

    def __init__(self, url: str) -> None:
        self.app = Celery("road", broker="memory://", set_as_current=True)
        self.app.conf.update(dislock_url=url, task_ignore_result=True)
        self.dislock = Dislock(self.app)
        declare = self.app.task
        self.locked = declare(base=SingletonTask, name="road.locked", lock_key="a:<n>")(_body)
        self.parked = declare(
            base=SingletonTask, name="road.parked", lock_key="b:<n>", lock_on_conflict="queue"
        )(_body)
        self.unique = declare(
            base=SingletonTask, name="road.unique", lock_key="c:<n>", lock_unique_until="end"
        )(_body)
        self.app.finalize()
        self.pool = InProcess()
        self._queue = self.app.connection_for_write().SimpleQueue("celery")

    def run(self, *, traces: bool = False) -> Passed | None:
        """Run the next message, as a worker does."""
        message = self._queue.get(timeout=WITHIN)
        message.ack()
        task = self.app.tasks[message.headers["task"]]
        self.pool.traces = traces
        made = symbol_by_name(task.Request)
        request = made(message, app=self.app, hostname="celery@road", task=task, eventer=_Nobody())
        request.execute_using_pool(self.pool)
        return self.pool.passed

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Let another thread hold a key, until the block ends; what is parked then has its turn."""
        ends, has = threading.Event(), threading.Event()

        def hold() -> None:
            with self.dislock.lock(key):
                has.set()
                ends.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        has.wait()
        try:
            yield
        finally:
            ends.set()
            thread.join()


class _Nobody:
    """Nobody wants events."""

    enabled = False

    def send(self, *_args: object, **_fields: object) -> None:
        """Send nothing."""


def _body(n: int) -> None:
    """Do nothing."""


def measure(url: str) -> dict[str, Passed]:
    """Make every journey twice; return what the second has passed."""
    sys.modules.pop(TRACING, None)  # redis-py imports it if it is installed, and nobody traces
    shop = Shop(url)
    passed: dict[str, Passed] = {}
    names = iter(GOALS)

    def note(found: Passed | None, name: str) -> None:
        assert found is not None, name
        passed[name] = found

    name = next(names)
    for traces in (False, True):
        shop.locked.delay(7)
        found = shop.run(traces=traces)
    note(found, name)

    acquire, release = next(names), next(names)
    for _ in range(2):
        made: list[ReentrantLock] = []

        def take(made: list[ReentrantLock] = made) -> None:
            made.append(shop.dislock.lock("d:7"))
            made[0].acquire()

        note(passed_by(take), acquire)
        note(passed_by(made[0].release), release)

    name = next(names)
    for n in range(2):
        note(passed_by(lambda n=n: shop.unique.delay(n)), name)  # type: ignore[misc]
        shop.run()

    parked, turn = next(names), next(names)
    for traces in (False, True):
        shop.parked.delay(7)
        with shop.held("b:7"):
            found = shop.run(traces=traces)
            if traces:
                note(found, parked)
        found = shop.run(traces=traces)
    note(found, turn)
    shop.dislock.runtime.close()
    return passed


def main() -> None:
    """Print the table; with ``-v``, also the modules of each journey in their order."""
    with (
        tempfile.TemporaryDirectory(prefix="dislock-road-") as folder,
        RedisServer(Path(folder)) as server,
    ):
        found = measure(server.url)
    print(f"{'journey':34} modules  goal  functions  goal  changes")
    for name, (modules, functions) in GOALS.items():
        one = found[name]
        print(
            f"{name:34} {len(one.modules):7}  {modules:4}  {one.functions:9}  {functions:4}  "
            f"{one.changes:7}"
        )
        if "-v" in sys.argv:
            print("   ", ", ".join(one.modules))


if __name__ == "__main__":
    main()
