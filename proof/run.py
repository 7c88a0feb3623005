"""One run: servers, processes that work, faults, and what is left at the end."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from celery.states import READY_STATES, REVOKED
from redis.backoff import NoBackoff
from redis.retry import Retry

from proof.checker import Verdict, check
from proof.clocks import CANNOT, Clocks, can_be_set
from proof.controls import CONTROLS
from proof.files import SharedFile
from proof.history import History, read
from proof.nemesis import HARMLESS, HOUR, LONG_PAUSE, Fault, Group, make_faults, of_processes
from proof.previous import MISSING, unpack
from proof.processes import BEAT, COROUTINES, LOCKING, SENDING, WORKER, Processes
from proof.servers import KINDS, STAYS, ttls
from proof.site import TICKS, Site
from tests.acceptance.rabbitmq import find_rabbitmq, running
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proof.controls import Control
    from proof.servers import LockServers
    from tests.acceptance.rabbitmq import RabbitServer

NO_BROKER = (
    "No RabbitMQ is here (rabbitmq-server, and epmd): tasks and beats are left out, only locks are "
    "tried. A Redis as the broker would lose messages itself. --simulate has tasks, and no servers."
)
TIMEOUT = 1.0  # seconds of a lease
BEATS = 3  # where the lock server can have lines
ROUND = 20.0  # seconds after which a control is looked at, whether it was caught
QUIET = 30.0  # seconds in which no task ends, after which those that are left are lost
START_WITHIN = 90.0  # seconds until the processes work
ASKED = 0.05  # seconds between two questions to the lock server, whether it answers
ANSWERS_WITHIN = 0.1  # seconds
SEEN = 0.2  # seconds between two looks at whether a failover is under way
LOOK_EVERY = 0.5  # seconds between two looks at what is waited for
LEFT_WITHIN = 120.0  # seconds until what stays for a dead process has expired


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    kind: str = "redis",
    control: str = "",
    enough: Callable[[Verdict], bool] | None = None,
    previous: str = "",
    say: Callable[[str], None] = print,
) -> Verdict:
    """
    Run the workloads under faults, and return what their history shows.

    Args:
        folder: For the history, the logs and the servers.
        seconds: How long there are faults.
        seed: Decides the faults.
        kind: Of the lock server, as :data:`proof.servers.KINDS` has it.
        control: What is broken on purpose; empty: nothing is.
        enough: Asked now and then; the run ends early when the verdict is enough.
        previous: The revision that is deployed, and undone again; empty: a usual one.
        say: Called with what cannot be tried here.
    """
    programs = find_rabbitmq()
    tasks = int(programs is not None)  # without a broker there are none
    if control and CONTROLS[control].promise == "nothing lost":
        seconds = min(seconds, ROUND)  # whether a task is lost is seen when all others have ended
    folder = folder.resolve()
    folder.mkdir(parents=True)
    earlier = unpack(folder / "previous", previous) if tasks and not control else None
    clocks = Clocks(folder / "clocks") if can_be_set() and not control else None
    if not control:
        no_deploy = MISSING if tasks else NO_BROKER
        for cannot in [no_deploy] * (not earlier) + [CANNOT] * (not clocks):
            say(cannot)
    path = folder / "history"
    history = History(path, "run")
    with ExitStack() as stack:
        broker = stack.enter_context(running(programs, folder / "broker")) if programs else None
        results = stack.enter_context(RedisServer(folder / "results"))
        servers = stack.enter_context(KINDS[kind](folder / "locks", clocks))
        site = Site(
            url=servers.url,
            options=servers.options,
            has_lines=servers.has_lines,
            broker=broker.url if broker else "",
            results=results.url,
            folder=str(folder),
            seed=seed,
            timeout=TIMEOUT,
            control=control,
        )
        has_beats = tasks * servers.has_lines
        with Processes(WORKER, 2 * tasks, site, history, clocks) as workers:
            with (
                Processes(LOCKING, 2, site, history, clocks) as locking,
                Processes(COROUTINES, 2, site, history, clocks) as coroutines,
                Processes(SENDING, tasks, site, history, clocks) as sending,
                Processes(BEAT, BEATS * has_beats, site, history, clocks) as beats,
            ):
                all_kinds = (workers, locking, coroutines, sending, beats)
                victims = [one for one in all_kinds if one.number]
                rare = [restart(broker)] if broker else []
                rare += [deploy(workers, earlier)] if earlier else []
                rare += [replace(beats)] * has_beats
                groups = make_groups(seed, servers, victims, rare, CONTROLS.get(control))
                stack.enter_context(repeating(ASKED, note_answers(servers, history)))
                stack.enter_context(repeating(SEEN, note_unrest(servers, history)))
                queue = stack.enter_context(results.client())
                stack.enter_context(repeating(SEEN, note_ticks(queue, history)))
                more = [("task", "begin")] * tasks + [("tick", "sent")] * has_beats
                wait_for_work(path, {("operation", "ok"), *more})
                until = time.monotonic() + seconds
                while (now := time.monotonic()) < until:
                    make_faults(groups, history, min(until, now + ROUND) if enough else until)
                    if enough and enough(check(read(path))):
                        return check(read(path))
            let_time_pass(servers, workers, history)
            note_outcomes(history, path, results, workers)
        if control:
            return check(read(path))
        for file in sorted(folder.glob("elements-*")):
            if not file.suffix:
                elements = SharedFile(file, fenced=False).read()
                history.add("file", file.name, "end", elements=elements)
        for key in left_behind(servers):
            history.add("key", key, "left")
    history.close()
    return check(read(path))


@contextmanager
def repeating(every: float, look: Callable[[], None]) -> Iterator[None]:
    """Look again and again, with some seconds in between, in a thread."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            with suppress(redis.RedisError, OSError):
                look()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def note_answers(servers: LockServers, history: History) -> Callable[[], None]:
    """Return what notes that the lock server answers, by which its own stalls are known."""
    urls = servers.proxied or [node.url for node in servers.nodes]
    once = {"socket_timeout": ANSWERS_WITHIN, "retry": Retry(NoBackoff(), 0)}
    clients = [servers.enter_context(redis.Redis.from_url(url, **once)) for url in urls]

    def ask() -> None:
        for client in clients:
            client.ping()
        history.add("server", "all of it", "answers")

    return ask


def note_unrest(servers: LockServers, history: History) -> Callable[[], None]:
    """Return what notes failovers as faults, also those that begin as the machine is slow."""
    about, more = "a failover is under way", {"loses_data": True}
    settled_at, unrest = time.monotonic(), False

    def look() -> None:
        nonlocal settled_at, unrest
        now = time.monotonic()
        with suppress(redis.RedisError, OSError):
            if servers.settled():
                settled_at = now
        if unrest != (settled_at < now):
            unrest = not unrest
            history.add("fault", about, "begin" if unrest else "end", at=settled_at, **more)

    return look


def wait_for_work(path: Path, work: set[tuple[str, str]]) -> None:
    """Wait until all of *work* is done once: what only starts cannot go wrong."""
    until = time.monotonic() + START_WITHIN
    while time.monotonic() < until:
        if work <= {(e.what, e.kind) for e in read(path)}:
            return
        time.sleep(LOOK_EVERY)


def make_groups(
    seed: int,
    servers: LockServers,
    victims: Sequence[Processes],
    rare: list[Fault],
    control: Control | None,
) -> list[Group]:
    """Return all faults, or those that show a control."""
    chances = [random.Random(f"{seed}:{number}") for number in range(3)]
    of_servers = servers.faults(chances[1], TIMEOUT)
    if control and control.shown_by:
        of_servers = [one for one in of_servers if one.name == control.shown_by]
    if control and control.alone:
        return [Group(chances[1], of_servers)]
    return [
        Group(chances[0], of_processes(victims, chances[0], TIMEOUT)),
        Group(chances[1], of_servers),
        *([Group(chances[2], rare, LONG_PAUSE)] if rare else []),
    ]


def restart(broker: RabbitServer) -> Fault:
    """Return the end of the broker, which then delivers again what was not acknowledged."""
    return Fault("restart the broker", broker.restart, {"redelivers": True, **HARMLESS})


def deploy(workers: Processes, earlier: Path) -> Fault:
    """
    Return a deploy of an earlier version, and its undoing.

    A worker may end before its acknowledgements have arrived: then their messages come again.
    """
    more = {"redelivers": True, **HARMLESS}

    def there_and_back() -> None:
        workers.deploy(earlier)
        workers.deploy(Path.cwd())

    return Fault("deploy the version before, and this one again", there_and_back, more)


def replace(beats: Processes) -> Fault:
    """Return a deploy of the beats, which excuses no silence as long as some of them run."""
    about = "replace the beats, one after the other"
    return Fault(about, partial(beats.deploy, Path.cwd()), HARMLESS)


def let_time_pass(servers: LockServers, workers: Processes, history: History) -> None:
    """
    Set the clocks forward, once nothing is wrong any more.

    What a clock that was wrong has put off, or has left behind, would else end in an hour.
    """
    if workers.has_clocks:
        about, more = "time passes", {"ends_leases": True} if servers.has_clocks else HARMLESS
        history.add("fault", about, "begin", **more)
        servers.set_clocks(HOUR)
        workers.set_clocks(2 * HOUR)
        workers.deploy(Path.cwd())
        history.add("fault", about, "end", **more)


def note_ticks(queue: redis.Redis, history: History) -> Callable[[], None]:
    """Return what takes the messages of the beats out of the queue, and notes them."""

    def take() -> None:
        while isinstance(message := queue.rpop(TICKS), bytes):
            headers = json.loads(message)["headers"]
            history.add("tick", headers["id"], "sent", **headers["sent"])

    return take


def note_outcomes(history: History, path: Path, results: RedisServer, workers: Processes) -> None:
    """Wait until all tasks have ended, and note the outcome of each that has one."""
    tasks = {e.about for e in read(path) if e.what == "task" and e.kind == "sent"}
    until = time.monotonic() + QUIET
    with results.client(decode_responses=True) as client:
        while tasks and time.monotonic() < until:
            workers.revive()
            for task in sorted(tasks):
                result = json.loads(client.get(f"celery-task-meta-{task}") or "{}")
                if result.get("status") in READY_STATES:
                    reason = str(result["result"]) if result["status"] == REVOKED else ""
                    history.add("task", task, "outcome", state=result["status"], reason=reason)
                    tasks.discard(task)
                    until = time.monotonic() + QUIET
            time.sleep(LOOK_EVERY)


def left_behind(servers: LockServers) -> list[str]:
    """Return the keys that are left; waits for those that expire soon."""
    until = time.monotonic() + LEFT_WITHIN
    while True:
        left = [k for k, ttl in ttls(servers) if ttl < 0 or not any(one in k for one in STAYS)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(LOOK_EVERY)
