"""Compare what the workers say of their locks, with each other and with the app here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from celery_dislock.operating.checks.table import Row, note, number, ok, serious, some, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery_dislock.operating.checks.facts import Description, Facts
    from celery_dislock.operating.checks.table import Finding


OF_SERVER = "The lock server "  # how a worker's warnings about its server begin

# Options for which a difference lets two tasks run at the same time.
DECIDE = ("lock_key", "lock_mode", "lock_limit")

# Checks of each worker that answers.
ROWS = (
    Row(
        "lock server",
        serious,
        lambda one, _: bool(one["tasks"] or one.get("enabled")) and one.get("no_server"),
        "These workers have no lock server",
        "Set dislock_url.",
    ),
    Row(
        "tasks",
        serious,
        lambda one, _: not one["locks"],
        "These workers run tasks without their locks (--no-dislock), also if others lock them",
        "Start them with --dislock.",
    ),
    Row(
        "renewals",
        serious,
        lambda one, _: one.get("unavailable"),
        "The lock server does not answer these workers",
        "Look at the network between them and the lock server.",
    ),
    Row(
        "renewals",
        warning,
        lambda one, _: bool(one.get("errors")),
        "The watchdog has survived unexpected errors",
        "Look for 'Unexpected error' in these workers' logs.",
    ),
    Row(
        "renewals",
        warning,
        lambda one, _: some(str(held.get("key")) for held in _held(one) if held.get("overdue")),
        "Running tasks missed two renewals in a row",
        "Their processes are stopped, their bodies hold the GIL, or the server was away.",
    ),
)


def answers(facts: Facts) -> Iterator[Finding]:
    """Tell which workers answer, and which of them know nothing of locks."""
    fleet = facts.fleet
    if fleet.error:
        yield warning(
            f"The workers could not be asked: {fleet.error}",
            "Start the broker. Until then nothing can be told about workers.",
        )
    elif not fleet.answers:
        yield warning(
            "No worker answers.",
            "Start one, or give them more time: --timeout 5. A worker with the pool solo does not "
            "answer while a task runs.",
        )
    strangers = fleet.answers.keys() - fleet.described.keys()
    if strangers:
        yield warning(
            "These workers have no celery-dislock, or one of another version than this command, or "
            f"did not answer in time: {some(strangers)}. What they do could not be compared.",
            "Update them. A worker without celery-dislock runs tasks without their locks.",
            strangers,
        )
    if known := fleet.described:
        yield ok(f"{number(len(known), 'worker')} answered: {some(known)}.", "", known)


def each(facts: Facts) -> Iterator[Finding]:
    """Judge each worker."""
    workers = facts.fleet.described
    found = [finding for row in ROWS for finding in row.finds(workers, facts)]
    yield from found
    if workers and not any(one.check == "renewals" for one in found):
        many = sum(len(_held(one)) for one in workers.values())
        who = f"{number(len(workers), 'worker')} renew{'s' if len(workers) == 1 else ''}"
        what = f"{who} {number(many, 'lease')} of running tasks in time."
        yield ok(what)._replace(check="renewals")


def places(facts: Facts) -> Iterator[Finding]:
    """Find workers that lock elsewhere than this command looks, and tasks locked in two places."""
    there = {name: one for name, one in facts.fleet.described.items() if not one.get("no_server")}
    ours = _by_value({"": facts.ours}, _place)
    if facts.ours["no_server"] is None and there and not ours.keys() & _by_value(there, _place):
        yield warning(
            f"This command looks at {some(ours)}, and the workers lock at "
            f"{some(_by_value(there, _place))}.",
            "Use the workers' configuration (-A, --dislock-url). Different spellings of one "
            "host count as different.",
        )
    for name in _tasks(facts):
        apart = _by_value(
            {side: one for side, one in there.items() if name in one["tasks"]}, _place
        )
        if len(apart) > 1:
            yield serious(
                f"Workers lock {name} on different servers or under different prefixes, so it may "
                f"run twice at a time: {_groups(apart)}.",
                "Give all of them the same dislock_url and dislock_prefix.",
                there,
            )


def tasks(facts: Facts) -> Iterator[Finding]:
    """Find apps without locks, and what workers have warned of."""
    if not _tasks(facts):
        what = "No task of this app has a lock, here or in a worker."
        yield note(what, "Give tasks a lock_key, and start the workers with --dislock.")
    warned: dict[str, list[str]] = {}
    for worker, answer in facts.fleet.described.items():
        for text in map(str, answer["warnings"]):
            if not text.startswith(OF_SERVER):  # it is looked at from here
                warned.setdefault(text, []).append(worker)
    for text, names in sorted(warned.items()):
        what, dot, remedy = text.rpartition(". ")
        what = f"When {some(names)} started: {what or remedy.rstrip('.')}."
        yield warning(what, remedy if dot else "", names)


def options(facts: Facts) -> Iterator[Finding]:
    """Find options that differ between workers, or from the app here."""
    for name in _tasks(facts):
        sides = {
            side: one["tasks"][name] for side, one in facts.sides.items() if name in one["tasks"]
        }
        workers = {side: given for side, given in sides.items() if side in facts.fleet.described}
        for option in sorted({option for given in sides.values() for option in given}):
            values = _by_value(sides, lambda given, o=option: given.get(o, "the default"))
            among = _by_value(workers, lambda given, o=option: given.get(o, "the default"))
            if len(values) > 1:
                twice = len(among) > 1 and option in DECIDE
                so = ", so it may run twice at a time" if twice else ""
                yield (serious if twice else warning)(
                    f"{option} of {name} differs{so}: {_groups(values)}.",
                    "Finish the deployment, or look for a setting that only some of them have.",
                    [name],
                )


CHECKS = (
    ("workers", answers),
    ("workers", each),
    ("lock server", places),
    ("tasks", tasks),
    ("options", options),
)


def _tasks(facts: Facts) -> list[str]:
    """Return the names of all tasks that lock, here or in a worker."""
    return sorted({name for answer in facts.sides.values() for name in answer["tasks"]})


def _held(answer: Description) -> list[Mapping[str, Any]]:
    return [lease for lease in answer["leases"] if lease.get("held")]


def _place(answer: Description) -> str:
    return f"{answer.get('server')}, prefix {answer.get('prefix')}"


def _by_value(sides: Mapping[str, Any], value: Callable[..., Any]) -> dict[str, list[str]]:
    """Group the sides by a value."""
    groups: dict[str, list[str]] = {}
    for side, answer in sides.items():
        found = value(answer)
        text = found if isinstance(found, str) else json.dumps(found, sort_keys=True)
        groups.setdefault(text, []).append(side)
    return groups


def _groups(groups: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} ({some(sides)})" for value, sides in sorted(groups.items()))
