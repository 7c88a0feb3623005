"""Examine the lock server: its settings, its replicas, its clock, and how fast it answers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from celery_dislock.operating.checks.table import Row, note, ok, serious, warning
from celery_dislock.parking.epoch import REMEDY, Epoch
from celery_dislock.words import for_people
from celery_dislock.worker.startup import evicts, is_replica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.checks.facts import Facts, RedisProcess
    from celery_dislock.operating.checks.table import Finding
    from celery_dislock.servers.trial import Complaint

SLOW = 0.05  # seconds: two of them are added to each task
IF_EMPTY = (
    "If it may come back without its data, do so only after the longest timeout is over: the "
    "bodies that run rely on their leases until then."
)
TOLD_FOR = 7 * 86400.0  # seconds for which a loss of data is told
TOKENS_OFF = 0.1  # seconds between the clocks of independent servers
KINDS_IN_WORDS = {
    "single": "a single server",
    "sentinel": "a master that Sentinels name",
    "cluster": "a node of a Redis Cluster",
    "quorum": "one of several independent servers",
}

_REPLICA = re.compile(r"slave\d+")
AS_AT_START = {"eviction": evicts, "role": is_replica}  # a worker warns of these when it starts


def _is_short(node: RedisProcess, facts: Facts) -> str:
    """Say how many replicas follow, if fewer do than each write waits for."""
    is_master, follow = node.info.get("role") == "master", len(_online(node))
    return f"{follow} of {facts.min_replicas}" if is_master and follow < facts.min_replicas else ""


def _is_alone(node: RedisProcess, facts: Facts) -> bool:
    """Tell whether nothing takes over if this master fails, though replicas are meant to."""
    is_master = node.info.get("role") == "master"
    return facts.server.kind in {"sentinel", "cluster"} and is_master and not _online(node)


def _goes_on_alone(node: RedisProcess, facts: Facts) -> bool:
    """Tell whether a master goes on if it is cut off from its Sentinels and its replicas."""
    is_followed = facts.server.kind == "sentinel" and _online(node)
    return bool(is_followed) and "min_slaves_good_slaves" not in node.info


def _online(node: RedisProcess) -> list[dict[str, str]]:
    """Return the replicas that follow a server."""
    described = (
        dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        for name, value in node.info.items()
        if _REPLICA.fullmatch(name)
    )
    return [replica for replica in described if replica.get("state") == "online"]


# Checks of each process of the lock server that answers.
ROWS = (
    Row(
        "settings",
        note,
        lambda node, _: node.no_info,
        "INFO is refused, so memory, role, replicas and what is saved could not be looked at",
        "Allow it if the server has it: ACL SETUSER ... +info",
    ),
    Row(
        "persistence",
        warning,
        lambda node, facts: node.info.get("aof_enabled") == "0" and facts.parks,
        "A crash or a restart loses the parked tasks that are not saved (appendonly no)",
        "Set appendonly to yes: parked tasks exist nowhere else.",
    ),
    Row(
        "persistence",
        warning,
        lambda node, facts: node.info.get("aof_enabled") == "0" and facts.server.kind == "quorum",
        "After a restart it has forgotten its leases, and may grant them again (appendonly no)",
        "Set appendonly to yes and appendfsync to always, or start it again only after the longest "
        "timeout is over.",
    ),
    Row(
        "replicas",
        serious,
        _is_short,
        "Fewer replicas follow than dislock_min_replicas, so no lock can be taken",
        "Start the replicas, or lower dislock_min_replicas.",
    ),
    Row(
        "replicas",
        warning,
        _is_alone,
        "No replica follows. If it fails, nothing takes over, and its locks are away",
        "Start a replica; better two.",
    ),
    Row(
        "replicas",
        warning,
        _goes_on_alone,
        "A master that is cut off from its Sentinels goes on taking locks",
        "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers.",
    ),
    Row(
        "round trip",
        warning,
        lambda node, _: (node.round_trip or 0.0) >= SLOW and f"{node.round_trip * 1000:.2g} ms",
        "Round trips are slow, and each locked task waits for two",
        "Keep the lock server near the workers.",
    ),
)


def server_findings(facts: Facts) -> Iterator[Finding]:
    """Find which processes of the lock server do not answer; of several, how many more may fail."""
    away = [node for node in facts.members if node.away]
    names = [node.name for node in away]
    why = "; ".join(f"{node.name}: {node.away}" for node in away)
    if facts.away:
        yield serious(
            f"The lock server is away, and no task can take a lock: {why}",
            f"Start it, or correct its URL (dislock_url, --dislock-url). {IF_EMPTY}",
            names,
        )
    elif away and facts.server.kind == "quorum":
        more = (len(facts.members) - 1) // 2 - len(away)
        yield warning(
            f"{len(away)} of {len(facts.members)} lock servers do not answer ({why}). "
            f"{f'{more} more' if more else 'No other'} may fail.",
            f"Start it again. {IF_EMPTY}",
            names,
        )
    elif away:
        what = f"Locks in the slots of these nodes cannot be taken or renewed: {why}"
        yield serious(what, f"Start it again. {IF_EMPTY}", names)
    for node in facts.answering:
        version = node.info.get("redis_version", "of an unknown version")
        name = "Valkey" if "valkey" in node.info.get("server_name", "") else "Redis"
        version = node.info.get("valkey_version", version)
        took = "" if node.round_trip is None else f", {node.round_trip * 1000:.2g} ms away"
        yield ok(f"{node.name} is {KINDS_IN_WORDS[facts.server.kind]}: {name} {version}{took}.")


def names(facts: Facts) -> Iterator[Finding]:
    """Find how all names in Redis begin, if Celery keeps its own apart by a `global_keyprefix`."""
    if facts.keyprefix and facts.prefix.startswith(facts.keyprefix):
        yield ok(f"All names begin with {facts.prefix!r}: global_keyprefix and dislock_prefix.")
    elif facts.keyprefix:
        yield note(
            f"Celery keeps its own names apart by global_keyprefix ({facts.keyprefix!r}). Names of "
            f"locks begin with {facts.prefix!r} alone, since their server is another one.",
            "If other environments have locks there, give each a dislock_prefix of its own, while "
            "none of its tasks runs.",
        )


def rights(facts: Facts) -> Iterator[Finding]:
    """Find scripts, commands or keys that the server, or a proxy before it, refuses."""
    refused = [complaint for complaint in facts.complaints if not complaint.passes]
    yield from map(_refused, refused)
    if not refused and not facts.away:
        yield ok("The server runs all scripts, and its user may do all that locks need.")


def writes(facts: Facts) -> Iterator[Finding]:
    """Find a server that refuses writes: its memory or disk is full, or replicas are missing."""
    yield from map(_refused, (complaint for complaint in facts.complaints if complaint.passes))


def data(facts: Facts) -> Iterator[Finding]:
    """Find that the server came back empty or with older data, and which tasks it has lost."""
    if facts.away or not facts.server.keeps_lines:
        return
    loss = Epoch(facts.server, facts.prefix, facts.broker).last_loss()
    if loss is not None and loss.ago < TOLD_FOR:
        yield (serious if loss.was > loss.left else warning)(
            f"The lock server came back {loss.how} {for_people(loss.ago)} ago. Tasks that were "
            f"parked at the last sweep before: {loss.was}; when a worker noticed it: {loss.left}.",
            REMEDY,
        )


def _refused(complaint: Complaint) -> Finding:
    what, remedy = (f"{text[:1].upper()}{text[1:]}." for text in (complaint.what, complaint.remedy))
    return serious(what, remedy, complaint.servers)


def sentinels(facts: Facts) -> Iterator[Finding]:
    """Find Sentinels that cannot name the master.  Blocks for the timeout of each."""
    asked = facts.server.watchers()
    mute = [(name, why) for name, why in asked if why]
    if mute:
        few = len(asked) - len(mute) <= len(asked) // 2
        why = "; ".join(f"{name}: {why}" for name, why in mute)
        yield (serious if few else warning)(
            f"{len(mute)} of {len(asked)} Sentinels do not name the master ({why})."
            + (" If the master fails, nothing takes over." if few else ""),
            "Start them, or take them out of the URL.",
            [name for name, _ in mute],
        )
    elif asked:
        yield ok(f"All {len(asked)} Sentinels name the master.")


def members(facts: Facts) -> Iterator[Finding]:
    """Judge each process."""
    for row in ROWS:
        yield from row.finds({node.name: node for node in facts.answering}, facts)
    for node in facts.answering:
        for name, finds in AS_AT_START.items():
            if found := finds(node.info):
                yield serious(*found, [node.name])._replace(check=name)


def clocks(facts: Facts) -> Iterator[Finding]:
    """Find clocks of several independent servers that are more than 0.1 s apart."""
    known = sorted((node.clock, node.name) for node in facts.members if node.clock is not None)
    if facts.server.kind == "quorum" and known and known[-1][0] - known[0][0] > TOKENS_OFF:
        (least, behind), (most, ahead) = known[0], known[-1]
        yield warning(
            f"The servers' clocks are {most - least:.2f} s apart: {behind} is behind, {ahead} "
            "ahead.",
            "Let NTP set them: fencing tokens grow only as far as these clocks agree.",
            [behind, ahead],
        )


CHECKS = (
    ("server", server_findings),
    ("prefix", names),
    ("rights", rights),
    ("writes", writes),
    ("data", data),
    ("sentinels", sentinels),
    ("server", members),
    ("clock", clocks),
)
