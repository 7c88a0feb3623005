"""What goes wrong during a run, on a schedule that a seed decides."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from proof.history import History

PAUSE = (0.2, 1.5)  # seconds between two faults of a group
LONG_PAUSE = (10.0, 30.0)  # the same, of faults after which much has to start again
ROUND = 12.0  # seconds; at the end of each nothing goes wrong for a while
CALM = 4.0  # seconds of each round without a fault, in which nothing may be lost


JUMPS = {"seconds": 2, "minutes": 90, "an hour": 3600}
HOUR = JUMPS["an hour"]
SPARES_PLACES = {"spares_places": True}
HARMLESS = {"spares_leases": True, **SPARES_PLACES}


class Fault(NamedTuple):
    """
    Something that can go wrong.

    Attributes:
        name: For the history.
        make: Makes it, and blocks until it is over.
        more: What it excuses, as the checker knows it: "loses_data", "redelivers", "ends_leases"
            (too early, or too late), "misses_releases"; by how many seconds it "sets_clock" that
            tokens go by; or that those who wait keep their places in line ("spares_places"), and
            all others what they have ("spares_leases"), or that it only "kills".
    """

    name: str
    make: Callable[[], None]
    more: Mapping[str, int] = {}


class Group(NamedTuple):
    """
    Faults of which one is made at a time, beside those of other groups.

    Attributes:
        chance: Decides which, and when.
        faults: The faults.
        pause: Seconds between two of them, from and to.
    """

    chance: random.Random
    faults: Sequence[Fault]
    pause: tuple[float, float] = PAUSE


class Victims(Protocol):
    """
    The processes of a run that are of one kind.

    Attributes:
        has_clocks: Whether their wall clocks can be set.
    """

    has_clocks: bool

    def revive(self) -> None:
        """Start another in place of each that has ended."""

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, and start another in its place."""

    def signal_one(self, chance: random.Random, number: signal.Signals) -> Callable[[], None]:
        """Send a signal to one; returns what sends SIGCONT to the same."""

    def clock_of_one(self, chance: random.Random) -> Callable[[int], None]:
        """Return what sets the clock of one by some seconds."""


def of_processes(victims: Sequence[Victims], chance: random.Random, timeout: float) -> list[Fault]:
    """Return what can go wrong with processes, whose leases have this timeout."""

    def killed() -> None:
        for those in victims:
            those.revive()
        chance.choice(victims).kill_one(chance)

    def stopped(seconds: float) -> Callable[[], None]:
        def stop() -> None:
            resume = chance.choice(victims).signal_one(chance, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                resume()

        return stop

    found = [
        Fault("kill a process", killed, {"kills": True, **SPARES_PLACES}),
        Fault("stop a process for less than its lease", stopped(0.5 * timeout)),
        Fault("stop a process for longer than its lease", stopped(2.0 * timeout)),
    ]
    if all(those.has_clocks for those in victims):

        def choose() -> Callable[[int], None]:
            return chance.choice(victims).clock_of_one(chance)

        found += of_clocks("a process", choose, chance, timeout, lambda _: HARMLESS)
    return found


def of_clocks(
    whose: str,
    choose: Callable[[], Callable[[int], None]],
    chance: random.Random,
    timeout: float,
    more: Callable[[int], Mapping[str, int]],
) -> list[Fault]:
    """
    Return jumps of clocks, forth and back again or back and forth again.

    Args:
        whose: For the names of the faults.
        choose: Returns what sets one of the clocks by some seconds.
        chance: Decides whether it goes forth or back first, and for how long.
        timeout: Seconds of a lease.
        more: Returns what a jump by some seconds excuses.
    """

    def jump(seconds: int) -> None:
        set_by = choose()
        set_by(chance.choice((seconds, -seconds)))
        try:
            time.sleep(timeout * chance.choice((0.3, 2.0)))
        finally:
            set_by(0)

    return [
        Fault(f"set the clock of {whose} by {name}", partial(jump, seconds), more(seconds))
        for name, seconds in JUMPS.items()
    ]


def make_faults(groups: Sequence[Group], history: History, until: float) -> None:
    """
    Make faults of each group, one after the other, and those of several groups at a time.

    Args:
        groups: The faults.
        history: Where each is noted.
        until: Monotonic time; blocks until then, and until the last fault is over.
    """
    start = time.monotonic()
    over = threading.Event()  # a fault could not be made, or the run is ended from outside

    def make_those_of(number: int) -> None:
        chance, faults, between = groups[number]
        while True:
            name, make, more = chance.choice(faults)
            now, pause = time.monotonic(), chance.uniform(*between)
            ends = (now + pause - start) % ROUND
            if ends > ROUND - CALM:
                pause += ROUND - ends
            if over.wait(max(0.0, min(pause, until - now))) or time.monotonic() >= until:
                return
            about = f"{name} ({number}, {now - start:.1f} s)"
            history.add("fault", about, "begin", **more)
            make()
            history.add("fault", about, "end", **more)

    with ThreadPoolExecutor() as pool:
        try:
            for done in as_completed([pool.submit(make_those_of, n) for n in range(len(groups))]):
                done.result()
        finally:
            over.set()
