"""
What other libraries do under the same faults, judged by the same checker: ``--peers``.

Libraries take turns on servers of their own.  In each turn the same seed decides their faults, with
leases of the same length.  A feature that a library does not have, or a promise that it does not
make, is a dash.

Of a lock, two uses are measured.  A *plain* body trusts the lock until an exception says that it
is lost.  One that *asks* puts that question to the library before each step: ours knows the answer
itself, and the others ask the server.  Each writes a file, which shows writes that were lost
without any history.

Of a library of tasks: two bodies of a key at a time; tasks that were accepted and never ran, though
no outcome says so; and keys that refuse a task when there is none any more.  Half of the tasks are
acknowledged early, as Celery does by default, and die with their process; the others late, and are
then sent again.  The lock server keeps its data here, for one that forgets leaves no key.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from importlib.metadata import version
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from celery.states import FAILURE, REVOKED

from proof.checker import check, exclusion, was_forgotten
from proof.events import all_tasks, faults, holds
from proof.files import SharedFile
from proof.history import History, read
from proof.nemesis import LONG_PAUSE, Fault, Group, make_faults, of_processes
from proof.peering import LOCKS, NAMES, USES
from proof.processes import PYTHON, Processes
from proof.run import START_WITHIN, TIMEOUT, note_outcomes, restart
from proof.servers import One
from proof.site import Site
from tests.acceptance.rabbitmq import find_rabbitmq, running
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from proof.history import Event
    from proof.servers import LockServers

TURNS = 2  # of each library, with seeds that follow each other
PEERING = (*PYTHON, "proof.peering")
LOOK_EVERY = 0.2  # seconds between two looks at a history
EXPIRED = 15.0  # seconds after which what a dead sender of ours has reserved has ended

# Columns of the two tables.
OF_LOCKS = (
    *(f"two at a time, {use}" for use in USES),
    *(f"writes lost, {use}" for use in USES),
    "writes lost, fenced",
    "refused though free",
)
OF_TASKS = ("two at a time", "never ran, late", "keys left, late", "keys left, early")

# How each library is used, and what its documentation says.
SETTINGS = {
    "celery-dislock": "lock: watchdog_timeout=1, on_lost='raise'; task: lock_unique_until='end', "
    "lock_on_conflict='queue', lock_on_lost='raise'",
    "redis-py": "Redis().lock(timeout=1); the body calls reacquire() every third of a second. Its "
    "documentation leaves renewal to the user",
    "python-redis-lock": "Lock(Redis(), expire=1, auto_renewal=True): 'to ensure the lock is held "
    "for as long as the Python process is running'",
    "celery-redbeat": "its lock with a timeout of 1 s, extended five times in that, as tick() "
    "does: 'uses a distributed lock to prevent multiple instances running'",
    "celery-once": "once={'graceful': True, 'keys': ['key']}, default_timeout of an hour: 'allows "
    "you to prevent multiple execution and queuing of celery tasks'",
    "celery-singleton": "unique_on=['key'], no lock_expiry: 'ensures only one instance of the task "
    "can be queued or running at any given time'. It has clear_locks() for what a crash leaves",
    "celery-heimdall": "heimdall={'unique': True, 'key': ...}, unique_timeout of an hour: 'for the "
    "given arguments, only 1 will ever run at the same time'",
}


class Table(NamedTuple):
    """
    What was measured of libraries of one kind.

    Attributes:
        of: "locks" or "tasks".
        heads: The columns.  All but the first and the last are violations per 1,000.
        rows: The cells of each library; of what it does not have, or promise, a dash.
        used: By library, how it was used, and what its documentation says.
    """

    of: str
    heads: list[str]
    rows: list[list[str]]
    used: dict[str, str]


def compare(
    folder: Path, *, seconds: float, seed: int, say: Callable[[str], None]
) -> Iterator[Table]:
    """
    Run each library under faults, and print what came of it.

    Args:
        folder: For histories, logs and servers.
        seconds: How long there are faults for each library, in all its turns.
        seed: Decides the faults; later turns take the numbers after it.
        say: Called with each line.

    Yields:
        The table of locks, then that of tasks.
    """
    for of, libraries, measure, columns, longest in (
        ("locks", list(LOCKS), measure_locks, OF_LOCKS, "a plain one went on for"),
        ("tasks", list(NAMES), measure_tasks, OF_TASKS, "keys are left for"),
    ):
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        most: dict[str, float] = defaultdict(float)
        for turn in range(TURNS):
            for library in libraries[turn:] + libraries[:turn]:
                place = folder / f"{of}-{library}-{seed + turn}"
                place.mkdir(parents=True)
                counts, lasted = measure(place, library, seconds / TURNS, seed + turn)
                counted[library] += counts
                most[library] = max(most[library], lasted)
        rows = [
            [
                f"{library} {version('redis' if library == 'redis-py' else library)}",
                *cells_of(counted[library], columns),
                shown(most[library]),
            ]
            for library in libraries
        ]
        used = {library: SETTINGS[library] for library in libraries}
        table = Table(of, ["per 1,000", *columns, longest], rows, used)
        show(table, say)
        yield table


def show(table: Table, say: Callable[[str], None]) -> None:
    """Print a table, and how each library was used."""
    lines = [table.heads, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        say("  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip())
    for library, how in table.used.items():
        say(f"{library}: {how}")


def cells_of(counted: Counter[str], columns: Sequence[str]) -> list[str]:
    """Return the figures of a library; a dash for what it does not have."""
    return [
        f"{1000 * counted[column] / of:.1f} ({counted[column]:,} of {of:,})" if of else "-"
        for column in columns
        for of in [counted[f"of {column}"]]
    ]


def shown(seconds: float) -> str:
    """Show a time; a key that does not expire is left for ever."""
    return "for ever" if seconds == math.inf else f"{seconds:,.3f} s" if seconds else "-"


def site_of(
    servers: LockServers, folder: Path, seed: int, *, broker: str = "", results: str = ""
) -> Site:
    """Return where a library works."""
    return Site(
        url=servers.url,
        options=servers.options,
        has_lines=servers.has_lines,
        broker=broker,
        results=results,
        folder=str(folder),
        seed=seed,
        timeout=TIMEOUT,
    )


def measure_locks(
    folder: Path, library: str, seconds: float, seed: int
) -> tuple[Counter[str], float]:
    """Take locks of a library under faults; returns the counts of each column."""
    path = folder / "history"
    history = History(path, "run")
    with One(folder / "locks") as servers:
        site = site_of(servers, folder, seed)
        with Processes((*PEERING, "take", library), 2, site, history) as takers:
            wait_for("operation", "ok", path)
            chances = [random.Random(f"{seed}:{number}") for number in range(2)]
            groups = (
                Group(chances[0], of_processes([takers], chances[0], TIMEOUT)),
                Group(chances[1], servers.faults(chances[1], TIMEOUT)),
            )
            make_faults(groups, history, time.monotonic() + seconds)
    note_files(folder, history)
    events = read(path)
    return judge_locks(events), went_on(events)


def note_files(folder: Path, history: History) -> None:
    """Note what each file has at the end."""
    for file in sorted(folder.glob("elements-*")):
        if not file.suffix:
            elements = SharedFile(file, fenced=False).read()
            history.add("file", file.name, "end", elements=elements)
    history.close()


def judge_locks(events: Sequence[Event]) -> Counter[str]:
    """Count what the history of locks shows, by column."""
    verdict, counted = check(events), Counter[str]()
    for use in USES:
        column = f"two at a time, {use}"
        counted[f"of {column}"] = sum(one.key.startswith(f"{use}:") for one in holds(events))
        counted[column] = sum(
            one.promise == "exclusion" and one.text.startswith(f"{use}:")
            for one in verdict.violations
        )
    for guard in (*USES, "fenced"):
        counted[f"of writes lost, {guard}"] = verdict.counts[f"elements, {guard}"]
        counted[f"writes lost, {guard}"] = verdict.counts[f"elements lost, {guard}"]
    counted["of refused though free"] = verdict.counts["operations"]
    counted["refused though free"] = verdict.counts["refused by nobody"]
    return counted


def went_on(events: Sequence[Event]) -> float:
    """Return for how long, at most, a plain body went on after another was granted its lock."""
    ran: dict[str, list[float]] = defaultdict(list)
    begun: dict[float, str] = {}
    for event in events:
        if event.what == "hold":
            begun.setdefault(event.at, event.about)
            ran[event.about].append(event.at)
    plain = [hold for hold in holds(events) if hold.key.startswith("plain:")]
    wrong, forgot = faults(events, spares="spares_leases"), faults(events, "loses_data")
    longest = 0.0
    for one, other in permutations(plain, 2):
        beside = one.key == other.key and one.begin < other.begin <= one.until
        if beside and not was_forgotten(one, other.begin, forgot, wrong):
            since = [at for at in ran[begun[one.begin]] if at >= other.begin]  # it may have slept
            longest = max(longest, since[-1] - since[0])
    return longest


def measure_tasks(
    folder: Path, library: str, seconds: float, seed: int
) -> tuple[Counter[str], float]:
    """Send and run a library's tasks under faults; returns counts, and how long keys are left."""
    programs = find_rabbitmq()
    assert programs is not None
    path = folder / "history"
    history = History(path, "run")
    with ExitStack() as stack:
        broker = stack.enter_context(running(programs, folder / "broker"))
        results = stack.enter_context(RedisServer(folder / "results"))
        servers = stack.enter_context(One(folder / "locks"))
        site = site_of(servers, folder, seed, broker=broker.url, results=results.url)
        with Processes((*PEERING, "work", library), 2, site, history) as workers:
            with Processes((*PEERING, "send", library), 1, site, history) as senders:
                wait_for("task", "begin", path)
                chances = [random.Random(f"{seed}:{number}") for number in range(3)]
                groups = (
                    Group(chances[0], of_processes([workers, senders], chances[0], TIMEOUT)),
                    Group(chances[1], keeping(servers.faults(chances[1], TIMEOUT))),
                    Group(chances[2], [restart(broker)], LONG_PAUSE),
                )
                make_faults(groups, history, time.monotonic() + seconds)
            note_outcomes(history, path, results, workers)
        time.sleep(EXPIRED)
        left, left_for = left_keys(library, site, read(path))
    history.close()
    return judge_tasks(read(path)) + left, left_for


def keeping(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults in which the server keeps its data: one that forgets leaves no key."""
    return [fault for fault in faults if not fault.more.get("loses_data")]


def left_keys(library: str, site: Site, events: Sequence[Event]) -> tuple[Counter[str], float]:
    """Send a task of each key, once all are over; counts those refused, and says for how long."""
    keys = sorted({event.more["key"] for event in events if "asked" in event.more})
    command = [*PEERING, "probe", library]
    done = subprocess.run(
        command,
        input=json.dumps(keys).encode(),
        stdout=subprocess.PIPE,
        env=site.environment(),
        check=True,
    )
    found = json.loads(done.stdout)
    left = Counter(f"keys left, {key.partition(':')[0]}" for key in found["left"])
    for_ever = any(seconds < 0 for seconds in found["seconds"])
    lasts = math.inf if for_ever else max(found["seconds"], default=0.0)
    return left, lasts if left else 0.0


def judge_tasks(events: Sequence[Event]) -> Counter[str]:
    """Count what the history of tasks shows, by column."""
    accepted = [one for one in all_tasks(events).values() if one.sent < math.inf]
    late = [one for one in accepted if one.more["key"].startswith("late:")]
    counted = Counter({f"of {column}": len(late) for column in OF_TASKS})
    counted["of two at a time"] = len(accepted)
    counted["of keys left, early"] = len(accepted) - len(late)
    counted["two at a time"] = sum(
        one.promise == "exclusion" for one in exclusion(events, Counter())
    )
    for one in late:
        said = one.outcome.more["state"] if one.outcome else ""
        counted["never ran, late"] += one.ended is None and said not in {FAILURE, REVOKED}
    return counted


def wait_for(what: str, kind: str, path: Path) -> None:
    """Wait until an event like this is in the history."""
    until = time.monotonic() + START_WITHIN
    while not any((event.what, event.kind) == (what, kind) for event in read(path)):
        assert time.monotonic() < until, f"{path}: no {what} {kind}"
        time.sleep(LOOK_EVERY)
