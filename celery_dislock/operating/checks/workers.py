"""Compare what the workers say of their locks, with each other and with the app here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from celery_dislock.operating.checks.table import Table
from celery_dislock.operating.findings import note, number, ok, serious, some, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.operating.checks.facts import Description, Facts
    from celery_dislock.operating.findings import Finding


OF_SERVER = "The lock server "  # how a worker's warnings about its server begin

# Options for which a difference lets two tasks run at the same time.
DECIDE = ("lock_key", "lock_mode", "lock_limit")

TABLE = Table()


@TABLE.check("workers")
def answers(facts: Facts) -> Iterator[Finding]:
    """Tell which workers answer, and which of them know nothing of locks."""
    fleet = facts.fleet
    if fleet.error:
        yield warning(
            f"The workers could not be asked: {fleet.error}",
            "Start the broker. Until then nothing can be told about workers, their leases and "
            "their queues.",
        )
    elif not fleet.answers:
        yield warning(
            "No worker answers.",
            "Start one, or give them more time: --timeout 5. A worker with the pool solo does not "
            "answer while a task runs.",
        )
    if fleet.twice:
        yield warning(
            f"Several workers share a name: {some(fleet.twice)}. Their answers and their leases "
            "cannot be told apart.",
            "Give each worker its own name (-n).",
            fleet.twice,
        )
    strangers = fleet.answers.keys() - fleet.described.keys()
    if strangers:
        yield warning(
            "These workers have no celery-dislock, or one that is older than this command, or did "
            f"not answer in time: {some(strangers)}. What they do could not be compared.",
            "Update them. A worker without celery-dislock runs tasks without their locks.",
            strangers,
        )
    if known := fleet.described:
        yield ok(f"{number(len(known), 'worker')} answered: {some(known)}.", "", known)


@TABLE.check("lock server")
def elsewhere(facts: Facts) -> Iterator[Finding]:
    """Find workers that lock elsewhere than this command looks, or nowhere."""
    workers, ours = facts.fleet.described, facts.ours
    there = {_place(answer) for answer in workers.values() if answer["no_server"] is None}
    if ours["no_server"] is None and there and _place(ours) not in there:
        yield warning(
            f"This command looks at {_place(ours)}, and the workers lock at {some(there)}.",
            "Use the workers' configuration (-A, --dislock-url). Different spellings of one "
            "host count as different.",
        )
    broken = [
        name
        for name, answer in workers.items()
        if answer["no_server"] is not None and (answer["tasks"] or answer["enabled"])
    ]
    if broken:
        why = workers[broken[0]]["no_server"]
        what = f"These workers have no lock server: {some(broken)}: {why}"
        yield serious(what, "Set dislock_url.", broken)


@TABLE.check("lock server")
def apart(facts: Facts) -> Iterator[Finding]:
    """Find tasks that workers lock in different places."""
    for name in _tasks(facts):
        workers = _having(name, facts.fleet.described)
        places = _by_value(workers, _place)
        if len(places) > 1:
            yield serious(
                f"Workers lock {name} on different servers or under different prefixes, so it may "
                f"run twice at a time: {_groups(places)}.",
                "Give all of them the same dislock_url and dislock_prefix.",
                workers,
            )


@TABLE.check("version")
def versions(facts: Facts) -> Iterator[Finding]:
    """Compare the versions of celery-dislock."""
    found = _by_value(facts.sides, lambda answer: answer["version"])
    if len(found) > 1:
        yield note(f"Versions of celery-dislock differ: {_groups(found)}.", "Finish the update.")


@TABLE.check("tasks")
def tasks(facts: Facts) -> Iterator[Finding]:
    """Find workers that do not lock, and what workers have warned of."""
    if not _tasks(facts):
        what = "No task of this app has a lock, here or in a worker."
        yield note(what, "Give tasks a lock_key, and start the workers with --dislock.")
    workers = facts.fleet.described
    unlocked = [name for name, answer in workers.items() if not answer["locks"]]
    if unlocked:
        what = f"These workers run tasks without their locks (--no-dislock): {some(unlocked)}."
        what += " Others lock the same tasks." if len(unlocked) < len(workers) else ""
        yield serious(what, "Start them with --dislock.", unlocked)
    warned: dict[str, list[str]] = {}
    for worker, answer in workers.items():
        for text in answer["warnings"]:
            if not text.startswith(OF_SERVER):  # it is looked at from here
                warned.setdefault(text, []).append(worker)
    for text, names in sorted(warned.items()):
        what, dot, remedy = text.rpartition(". ")
        what = f"When {some(names)} started: {what or remedy.rstrip('.')}."
        yield warning(what, remedy if dot else "", names)


@TABLE.check("options")
def options(facts: Facts) -> Iterator[Finding]:
    """Find options that differ between workers, or from the app here."""
    for name in _tasks(facts):
        sides = _having(name, facts.sides)
        workers = _having(name, facts.fleet.described)
        differ = len(_by_value(workers, lambda answer, n=name: answer["tasks"][n])) > 1
        for option in sorted(
            {option for answer in sides.values() for option in answer["tasks"][name]}
        ):
            values = _by_value(
                sides, lambda answer, n=name, o=option: answer["tasks"][n].get(o, "the default")
            )
            if len(values) > 1:
                twice = differ and option in DECIDE
                so = ", so it may run twice at a time" if twice else ""
                yield (serious if twice else warning)(
                    f"{option} of {name} differs{so}: {_groups(values)}.",
                    "Finish the deployment, or look for a setting that only some of them have.",
                    [name],
                )


@TABLE.check("renewals")
def renewals(facts: Facts) -> Iterator[Finding]:
    """Find workers whose leases are not renewed in time, or may soon not be."""
    answers = facts.fleet.described
    cut_off = {name: one["unavailable"] for name, one in answers.items() if one["unavailable"]}
    if cut_off:
        what = f"The lock server does not answer these workers: {some(cut_off)}: "
        remedy = "Look at the network between them and the lock server."
        yield serious(what + next(iter(cut_off.values())), remedy, cut_off)
    erring = [name for name, one in answers.items() if one["errors"]]
    if erring:
        what = f"The watchdog has survived unexpected errors: {some(erring)}."
        yield warning(what, "Look for 'Unexpected error' in these workers' logs.", erring)
    leases = [lease for one in answers.values() for lease in one["leases"] if lease.get("held")]
    overdue = [str(lease.get("key")) for lease in leases if lease.get("overdue")]
    if overdue:
        what = f"Running tasks missed two renewals in a row: {some(overdue)}."
        remedy = "Their processes are stopped, their bodies hold the GIL, or the server was away."
        yield warning(what, remedy, overdue)
    if answers and not (cut_off or erring or overdue):
        who = f"{number(len(answers), 'worker')} renew{'s' if len(answers) == 1 else ''}"
        yield ok(f"{who} {number(len(leases), 'lease')} of running tasks in time.")


def _tasks(facts: Facts) -> list[str]:
    """Return the names of all tasks that lock, here or in a worker."""
    return sorted({name for answer in facts.sides.values() for name in answer["tasks"]})


def _having(task: str, sides: Mapping[str, Description]) -> dict[str, Description]:
    return {side: answer for side, answer in sides.items() if task in answer["tasks"]}


def _place(answer: Description) -> str:
    return f"{answer['server']}, prefix {answer['prefix']}"


def _by_value(sides: Mapping[str, Description], value: Callable[..., Any]) -> dict[str, list[str]]:
    """Group the sides by a value."""
    groups: dict[str, list[str]] = {}
    for side, answer in sides.items():
        found = value(answer)
        text = found if isinstance(found, str) else json.dumps(found, sort_keys=True)
        groups.setdefault(text, []).append(side)
    return groups


def _groups(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} ({some(sides)})" for value, sides in sorted(groups.items()))
