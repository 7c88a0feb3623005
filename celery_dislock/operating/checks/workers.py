"""Compare what the workers say of their locks, with each other and with the app here."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from celery_dislock.operating.checks.table import Row, note, number, ok, serious, warning
from celery_dislock.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery_dislock.operating.checks.facts import Description, Facts
    from celery_dislock.operating.checks.table import Finding


OF_SERVER = "The lock server "  # how a worker's warnings about its server begin

# Options of which a difference is serious, and what two tasks may do because of it.
DECIDE = dict.fromkeys(("lock_key", "lock_mode", "lock_limit"), "run twice at a time")
DECIDE |= dict.fromkeys(("lock_rate", "lock_cost"), "start more often than one of them allows")

# Checks of each worker that answers.
ROWS = (
    Row(
        "lock server",
        serious,
        lambda answer, _: (
            bool(answer["tasks"] or answer.get("enabled")) and answer.get("no_server")
        ),
        "These workers have no lock server",
        "Set dislock_url.",
    ),
    Row(
        "tasks",
        serious,
        lambda answer, _: not answer["locks"],
        "These workers run tasks without their locks (--no-dislock), also if others lock them",
        "Start them with --dislock.",
    ),
    Row(
        "renewals",
        serious,
        lambda answer, _: answer.get("unavailable"),
        "The lock server does not answer these workers",
        "Look at the network between them and the lock server.",
    ),
    Row(
        "renewals",
        warning,
        lambda answer, _: bool(answer.get("errors")),
        "The watchdog has survived unexpected errors",
        "Look for 'Unexpected error' in these workers' logs.",
    ),
    Row(
        "renewals",
        warning,
        lambda answer, _: some(
            str(held.get("key")) for held in _held(answer) if held.get("overdue")
        ),
        "Running tasks missed two renewals in a row",
        "Their processes are stopped, their bodies hold the GIL, or the server was away.",
    ),
    Row(
        "renewals",
        warning,
        lambda answer, _: some(
            f"{lease.get('key')} of {lease.get('id')}"
            for lease in answer["leases"]
            if lease.get("missed")
        ),
        "Running tasks do not hold their locks, so that others may run beside them",
        "They were renewed as often as max_renew_times says, or were lost or freed: celery dislock "
        "why ID. With lock_on_cap or lock_on_lost such a task is ended.",
    ),
)


# What to do about a broker that cannot be asked, by what it or the operating system says.
REMEDIES = {
    r"used memory > 'maxmemory'|\bOOM\b": "Its memory is full, and it takes no messages: raise its "
    "maxmemory, or purge what nobody needs.",
    r"blocked": "It takes no messages, because its memory or its disk is nearly full: rabbitmq-"
    "diagnostics alarms. Free some, or raise the watermark.",
    r"MISCONF|NOREPLICAS": "It takes no messages: look at its log, its disk and its replicas.",
    r"read only replica|READONLY": "Name its master in broker_url: a replica takes no messages.",
    r"LOADING|loading the dataset": "Wait until it has loaded its data.",
    r"max number of clients": "Raise its limit of connections, or end some (broker_pool_limit).",
    r"Authentication|username|ACCESS_REFUSED - Login|NOAUTH|WRONGPASS": "Correct the user and the "
    "password in broker_url.",
    r"permission|NOPERM|ACCESS_REFUSED|NOT_ALLOWED - access": "Allow its user what Celery needs "
    "(ACL SETUSER, or rabbitmqctl set_permissions).",
    r"DB index|vhost|NOT_ALLOWED": "Correct the database or the virtual host in broker_url.",
    r"TLS|SSL|certificate": "Correct broker_use_ssl, or the port and the certificates.",
    r"not known|nodename|name resolution|No address": "Correct the host in broker_url.",
    r"refused|no answer|timed out|reset|closed|unreachable|No route|broke|No such file": "Start "
    "it, or correct broker_url.",
}
UNKNOWN = "Look at the broker's log."


def worker_findings(facts: Facts) -> Iterator[Finding]:
    """Find workers that do not answer or lack this package, and a broker that is away or full."""
    fleet = facts.fleet
    missed = serious if facts.needs_workers else warning
    but = " But tasks hold locks, or wait for them." if facts.needs_workers else ""
    if fleet.error:
        found = (does for says, does in REMEDIES.items() if re.search(says, fleet.error))
        yield missed(
            f"The broker did not let the workers be asked: {fleet.error.rstrip('.')}.{but}",
            f"{next(found, UNKNOWN)} Until then nothing can be told about workers.",
        )
    elif not fleet.answers:
        yield missed(
            f"No worker answers.{but}",
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
    if workers and not any(finding.check == "renewals" for finding in found):
        many = sum(len(_held(answer)) for answer in workers.values())
        who = f"{number(len(workers), 'worker')} renew{'s' if len(workers) == 1 else ''}"
        what = f"{who} {number(many, 'lease')} of running tasks in time."
        yield ok(what)._replace(check="renewals")


def places(facts: Facts) -> Iterator[Finding]:
    """Find workers that lock the same task elsewhere than others, or than this command looks."""
    there = {
        name: answer
        for name, answer in facts.fleet.described.items()
        if not answer.get("no_server")
    }
    ours = {"this command": facts.ours} if facts.ours["no_server"] is None else {}
    apart = {
        task
        for task in _tasks(facts)
        if len(
            _by_value({w: answer for w, answer in there.items() if task in answer["tasks"]}, _place)
        )
        > 1
    }
    groups = _groups(_by_value({**there, **ours}, _place))
    if apart:
        yield serious(
            f"Workers lock the same tasks on different servers or under different prefixes, so "
            f"these may run twice at a time: {some(apart)}. Locks are at {groups}.",
            "Give all of them the same dislock_url and dislock_prefix.",
            there,
        )
    elif ours and there and not _by_value(ours, _place).keys() & _by_value(there, _place):
        yield warning(
            f"This command looks elsewhere than the workers lock: {groups}.",
            "Use the workers' configuration (-A, --dislock-url). Different spellings of one "
            "host count as different.",
        )


def tasks(facts: Facts) -> Iterator[Finding]:
    """Find an app without locks, and what workers warned of when they started."""
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
    found: dict[tuple[bool, str, str], list[str]] = {}
    workers = facts.fleet.described.keys()
    for name in _tasks(facts):
        sides = {
            side: side_tasks["tasks"][name]
            for side, side_tasks in facts.sides.items()
            if name in side_tasks["tasks"]
        }
        for option in sorted({option for given in sides.values() for option in given}):
            values = _by_value(sides, lambda given, o=option: given.get(o, "the default"))
            if len(values) > 1:
                among = [names for names in values.values() if not workers.isdisjoint(names)]
                decides = len(among) > 1 and option in DECIDE
                found.setdefault((decides, option, _groups(values)), []).append(name)
    for (decides, option, groups), names in found.items():
        they = "it" if len(names) == 1 else "they"
        so = f", so {they} may {DECIDE[option]}" if decides else ""
        yield (serious if decides else warning)(
            f"{option} of {some(names)} differs{so}: {groups}.",
            "Finish the deployment, or look for a setting that only some of them have.",
            names,
        )


CHECKS = (
    ("workers", worker_findings),
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
