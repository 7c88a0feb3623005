"""Compare what the workers tell of their locks, with each other and with the app here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.operating.findings import (
    NOTE,
    OK,
    SERIOUS,
    WARNING,
    Finding,
    listed,
    number,
    some,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Told = Mapping[str, Any]

LATE = 2.0  # seconds by which a renewal may be late without a finding

OF_SERVER = "The lock server "  # how a worker's warnings about its server begin

# Options for which a difference lets two tasks run at the same time.
DECIDE = ("lock_key", "lock_mode", "lock_limit")


class Fleet(NamedTuple):
    """
    What the workers have answered.

    Attributes:
        told: What each worker that answers tells of its locks, by its name; None: it knows no
            ``inspect dislock``.
        queues: The queues that each worker consumes, as ``inspect active_queues`` tells them.
        error: Why the workers could not be asked; empty: they were.
        twice: Names that several workers share.
    """

    told: Mapping[str, Told | None]
    queues: Mapping[str, Sequence[Told]]
    error: str = ""
    twice: Sequence[str] = ()

    @property
    def locking(self) -> dict[str, Told]:
        """What the workers tell that have this command, by their names."""
        return {name: told for name, told in self.told.items() if told is not None}


def understood(told: object) -> Told | None:
    """
    Return what a worker tells in the form that the checks expect; None if it is something else.

    Any version may answer, and any program that the broker lets in.
    """
    if not isinstance(told, dict) or not isinstance(told.get("processes"), list):
        return None
    texts = ("version", "server", "prefix", "no_server")
    tasks = told.get("tasks")
    warnings = told.get("warnings")
    return {
        **{name: _text(told.get(name)) for name in texts},
        "enabled": told.get("enabled"),
        "locks": told.get("locks") is not False,
        "tasks": {
            str(name): options
            for name, options in (tasks.items() if isinstance(tasks, dict) else ())
            if isinstance(options, dict)
        },
        "warnings": [str(one) for one in (warnings if isinstance(warnings, list) else ())],
        "processes": [_process(one) for one in told["processes"] if isinstance(one, dict)],
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _process(told: Told) -> Told:
    numbers = {
        name: value if isinstance(value := told.get(name), (int, float)) else 0
        for name in ("pid", "held", "errors", "outages", "worst_late")
    }
    return {**numbers, "unchanged_for": told.get("unchanged_for")}


def answers(fleet: Fleet) -> Iterator[Finding]:
    """Tell which workers answer, and which of them know nothing of locks."""
    if fleet.error:
        yield Finding(
            "workers",
            WARNING,
            f"The workers could not be asked: {fleet.error}",
            "Start the broker. Until then nothing can be told about workers, their leases and "
            "their queues.",
        )
        return
    if not fleet.told:
        yield Finding(
            "workers",
            WARNING,
            "No worker answers.",
            "Start one, or give them more time: --timeout 5. A worker with the pool solo does not "
            "answer while a task runs.",
        )
        return
    if fleet.twice:
        yield Finding(
            "workers",
            WARNING,
            f"Several workers share a name: {some(fleet.twice)}. Their answers and their leases "
            "cannot be told apart.",
            "Give each worker its own name (-n).",
            listed(fleet.twice),
        )
    strangers = [name for name, told in fleet.told.items() if told is None]
    if strangers:
        yield Finding(
            "workers",
            WARNING,
            "These workers have no celery-dislock, or one that is older than this command, or did "
            f"not answer in time: {some(strangers)}. What they do could not be compared.",
            "Update them. A worker without celery-dislock runs tasks without their locks.",
            listed(strangers),
        )
    if fleet.locking:
        what = f"{number(len(fleet.locking), 'worker')} answered: {some(fleet.locking)}."
        yield Finding("workers", OK, what, "", listed(fleet.locking))


def compared(ours: Told, fleet: Fleet) -> Iterator[Finding]:
    """Compare versions, servers, prefixes and whether tasks lock."""
    workers = fleet.locking
    if ours["no_server"] is None:
        here = (ours["server"], ours["prefix"])
        there = {
            (told["server"], told["prefix"])
            for told in workers.values()
            if told["no_server"] is None
        }
        if there and here not in there:
            yield Finding(
                "lock server",
                WARNING,
                f"This command looks at {_place(*here)}, and the workers lock at "
                f"{some(_place(*one) for one in there)}.",
                "Use the workers' configuration (-A, --dislock-url). Different spellings of one "
                "host count as different.",
            )
    versions = _by_value({**workers, "this command": ours}, lambda told: told["version"])
    if len(versions) > 1:
        what = f"Versions of celery-dislock differ: {_sides(versions)}."
        yield Finding("version", NOTE, what, "Finish the update.")
    broken = [
        name
        for name, told in workers.items()
        if told["no_server"] is not None and (told["tasks"] or told["enabled"])
    ]
    for name in broken[:1]:
        what = f"These workers have no lock server: {some(broken)}: {workers[name]['no_server']}"
        yield Finding("lock server", SERIOUS, what, "Set dislock_url.", listed(broken))


def _place(server: str, prefix: str) -> str:
    return f"{server}, prefix {prefix}"


def tasks(ours: Told, fleet: Fleet) -> Iterator[Finding]:
    """Find tasks that some workers lock in another way than others, or not at all."""
    sides = {**fleet.locking, "this command": ours}
    if not any(told["tasks"] for told in sides.values()):
        what = "No task of this app has a lock, here or in a worker."
        remedy = "Give tasks a lock_key, and start the workers with --dislock."
        yield Finding("tasks", NOTE, what, remedy)
    unlocked = [name for name, told in fleet.locking.items() if not told["locks"]]
    if unlocked:
        others = len(unlocked) < len(fleet.locking)
        what = f"These workers run tasks without their locks (--no-dislock): {some(unlocked)}."
        what += " Others lock the same tasks." if others else ""
        remedy = "Start them with --dislock."
        yield Finding("tasks", SERIOUS, what, remedy, listed(unlocked))
    for name in sorted({name for told in sides.values() for name in told["tasks"]}):
        having = {side: told for side, told in sides.items() if name in told["tasks"]}
        yield from _of_task(name, having)
    warned: dict[str, list[str]] = {}
    for worker, told in fleet.locking.items():
        for warning in told["warnings"]:
            if not warning.startswith(OF_SERVER):  # it is looked at from here
                warned.setdefault(warning, []).append(worker)
    for warning, workers in sorted(warned.items()):
        what, _, remedy = warning.rpartition(". ")
        what = f"When {some(workers)} started: {what or remedy.rstrip('.')}."
        yield Finding("tasks", WARNING, what, remedy if ". " in warning else "", listed(workers))


def _of_task(name: str, having: Mapping[str, Told]) -> Iterator[Finding]:
    workers = {side: told for side, told in having.items() if "processes" in told}
    places = _by_value(workers, lambda told: _place(told["server"], told["prefix"]))
    if len(places) > 1:
        yield Finding(
            "lock server",
            SERIOUS,
            f"Workers lock {name} on different servers or under different prefixes, so it may run "
            f"twice at a time: {_sides(places)}.",
            "Give all of them the same dislock_url and dislock_prefix.",
            listed(workers),
        )
    options = {option for told in having.values() for option in told["tasks"][name]}
    for option in sorted(options):
        values = _by_value(having, lambda told, o=option: told["tasks"][name].get(o, "the default"))
        if len(values) < 2:  # noqa: PLR2004 -- two sides differ
            continue
        twice = option in DECIDE and len(_by_value(workers, lambda t: t["tasks"][name])) > 1
        yield Finding(
            "options",
            SERIOUS if twice else WARNING,
            f"{option} of {name} differs{', so it may run twice at a time' if twice else ''}: "
            f"{_sides(values)}.",
            "Finish the deployment, or look for a setting that only some of them have.",
            [name],
        )


def _by_value(sides: Mapping[str, Told], value: Callable[..., Any]) -> dict[str, list[str]]:
    """Group the sides by a value."""
    groups: dict[str, list[str]] = {}
    for side, told in sides.items():
        told_value = value(told)
        text = told_value if isinstance(told_value, str) else json.dumps(told_value, sort_keys=True)
        groups.setdefault(text, []).append(side)
    return groups


def _sides(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} ({some(sides)})" for value, sides in sorted(groups.items()))


def watchdogs(fleet: Fleet) -> Iterator[Finding]:
    """Find processes whose watchdog had trouble."""
    processes = [
        (f"{worker} (pid {one['pid']})", one)
        for worker, told in fleet.locking.items()
        for one in told["processes"]
    ]
    silent = [name for name, one in processes if one["unchanged_for"] is None]
    if silent:
        what = f"These pool processes have not told their figures: {some(silent)}."
        remedy = "They are starting, or cannot write to the folder of temporary files (TMPDIR)."
        yield Finding("renewals", NOTE, what, remedy, listed(silent))
    told = [(name, one) for name, one in processes if one["unchanged_for"] is not None]
    erring = [name for name, one in told if one["errors"]]
    if erring:
        what = f"The watchdog has survived unexpected errors: {some(erring)}."
        remedy = "Look for 'Unexpected error' in these workers' logs."
        yield Finding("renewals", WARNING, what, remedy, listed(erring))
    late = [name for name, one in told if one["worst_late"] > LATE]
    if late:
        worst = max(one["worst_late"] for _, one in told)
        what = f"Leases were renewed up to {worst:.1f} s late: {some(late)}."
        remedy = "Their processes were stopped, their bodies held the GIL, or the server was away."
        yield Finding("renewals", WARNING, what, remedy, listed(late))
    failing = [name for name, one in told if one["outages"]]
    if failing:
        times = sum(one["outages"] for _, one in told)
        what = f"Renewals have failed in {number(times, 'outage')} since these processes began: "
        yield Finding("renewals", NOTE, f"{what}{some(failing)}.", "", listed(failing))
    if told and not (erring or late or failing):
        held = sum(one["held"] for _, one in told)
        who = f"{number(len(told), 'process')} renew{'s' if len(told) == 1 else ''}"
        what = f"{who} {number(held, 'lease')} in time."
        yield Finding("renewals", OK, what)


def about(ours: Told, fleet: Fleet) -> Iterator[Finding]:
    """
    Judge what the workers have told.  No round trip.

    Args:
        ours: What the app here tells of its locks; see :mod:`celery_dislock.operating.about`.
        fleet: What the workers have told.
    """
    yield from answers(fleet)
    yield from compared(ours, fleet)
    yield from tasks(ours, fleet)
    yield from watchdogs(fleet)


def parks(sides: Iterable[Told]) -> bool:
    """Tell whether a task parks, here or in a worker."""
    return any(
        options.get("lock_on_conflict") == "queue"
        for told in sides
        for options in told["tasks"].values()
    )
