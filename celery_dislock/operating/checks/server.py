"""Examine the lock server: its settings, its replicas, its clock, and how fast it answers.

Nothing here needs more rights than locks need, except to read two settings about saving to disk.
If the server refuses a command, a finding says what could not be looked at.
"""

from __future__ import annotations

import re
import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import ForbiddenError, StoreError
from celery_dislock.operating.findings import NOTE, OK, SERIOUS, WARNING, Finding
from celery_dislock.scripts import TRY
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.permissions import check_rights, tried_in
from celery_dislock.servers.replies import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.servers.server import Server

OLDEST = (6, 2)  # version of Redis
ROUND_TRIPS = 11  # that are timed
SLOW = 0.05  # seconds: two of them are added to each task
CLOCK_OFF = 1.0  # seconds
TOKENS_OFF = 0.1  # seconds between the clocks of independent servers
LAG = 10  # seconds without a word from a replica
NEARLY_FULL = 0.9  # of maxmemory
KINDS = {
    "single": "a single server",
    "sentinel": "a master that Sentinels name",
    "cluster": "a node of a Redis Cluster",
    "quorum": "one of several independent servers",
}

REFUSES = re.compile(r"\b(OOM|MISCONF|NOREPLICAS)\b")  # a replica is found by its role
_REPLICA = re.compile(r"slave\d+")


class Member(NamedTuple):
    """
    One Redis process of the lock server, as it was found.

    Attributes:
        name: Its URL without password.
        away: Why it does not answer; empty: it does.
        info: The fields of ``INFO``; empty: not known.
        no_info: Why they are not known.
        config: Settings that ``CONFIG GET`` told; those that it refused are missing.
        round_trips: Seconds of each round trip that was timed.
        clock: Seconds by which its clock is ahead of the clock here; None: not known.
    """

    name: str
    away: str = ""
    info: Mapping[str, str] = {}
    no_info: str = ""
    config: Mapping[str, str] = {}
    round_trips: Sequence[float] = ()
    clock: float | None = None


def examine(name: str, send: Callable[..., Any]) -> Member:
    """
    Ask one server about itself.  Blocks for about fifteen round trips.

    Args:
        name: Its URL without password.
        send: Sends it a command.
    """
    times, ahead = [], []
    try:
        for _ in range(ROUND_TRIPS):
            began, at = time.perf_counter(), time.time()
            seconds, micros = send(b"TIME")
            took = time.perf_counter() - began
            times.append(took)
            ahead.append(int(seconds) + int(micros) / 1e6 - (at + took / 2))
    except StoreError as exc:
        if not is_answer(exc):
            return Member(name, away=exc.reason)
    info, no_info = _info(send)
    return Member(
        name,
        info=info,
        no_info=no_info,
        config=dict(_config(send, "save", "appendfsync")),
        round_trips=times,
        clock=median(ahead) if ahead else None,
    )


def _info(send: Callable[..., Any]) -> tuple[dict[str, str], str]:
    try:
        text = send(b"INFO").decode(errors="replace")
    except StoreError as exc:
        return {}, exc.reason
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line), ""


def _config(send: Callable[..., Any], *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            told = send(b"CONFIG", b"GET", name)
        except StoreError:
            return
        parts = next(iter(told.items()), ()) if isinstance(told, dict) else told
        if parts:
            yield name, parts[1].decode(errors="replace")


def members(server: Server) -> list[Member]:
    """Ask all processes of a lock server; one that does not answer is told as such."""
    try:
        return [examine(name, send) for name, send in server.members()]
    except StoreError as exc:
        return [Member(server.name, away=exc.reason)]


def answering(server: Server, found: Sequence[Member]) -> list[Finding]:
    """Tell what kind of server it is, and which processes of it do not answer."""
    away = [one for one in found if one.away]
    findings = []
    if len(away) == len(found) or (server.kind == "quorum" and len(away) * 2 >= len(found)):
        told = "; ".join(f"{one.name}: {one.away}" for one in away)
        findings.append(
            Finding(
                "server",
                SERIOUS,
                f"The lock server is away, and no task can take a lock: {told}",
                "Start it, or name another one (dislock_url, --dislock-url).",
                [one.name for one in away],
            )
        )
    elif away:
        told = "; ".join(f"{one.name}: {one.away}" for one in away)
        quorum = server.kind == "quorum"
        left = (len(found) - 1) // 2 - len(away)
        what = (
            f"{len(away)} of {len(found)} lock servers do not answer ({told}). "
            + ("No other may fail." if left <= 0 else f"{left} more may fail.")
            if quorum
            else f"Locks in the slots of these nodes cannot be taken or renewed: {told}"
        )
        level = WARNING if quorum else SERIOUS
        findings.append(
            Finding("server", level, what, "Start it again.", [one.name for one in away])
        )
    for one in found:
        if not one.away:
            version = one.info.get("redis_version", "of an unknown version")
            name = "Valkey" if "valkey" in one.info.get("server_name", "") else "Redis"
            version = one.info.get("valkey_version", version)
            what = f"{one.name} is {KINDS[server.kind]}: {name} {version}."
            findings.append(Finding("server", OK, what))
    return findings


def sentinels(server: Server) -> Iterator[Finding]:
    """Find Sentinels that cannot tell the master.  Blocks for the timeout of each."""
    told: list[tuple[str, str]] = getattr(server, "watchers", list)()
    mute = [(name, why) for name, why in told if why]
    if not told:
        return
    if not mute:
        yield Finding("sentinels", OK, f"All {len(told)} Sentinels name the master.")
        return
    few = len(told) - len(mute) <= len(told) // 2
    why = "; ".join(f"{name}: {why}" for name, why in mute)
    yield Finding(
        "sentinels",
        SERIOUS if few else WARNING,
        f"{len(mute)} of {len(told)} Sentinels do not name the master ({why})."
        + (" If the master fails, nothing takes over." if few else ""),
        "Start them, or take them out of the URL.",
        [name for name, _ in mute],
    )


def version(one: Member) -> Iterator[Finding]:
    """Find a server that is too old."""
    told = one.info.get("redis_version", "")
    numbers = tuple(int(part) for part in told.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        what = f"Redis {told} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that is tested."
        yield Finding("version", WARNING, what, "Update it.")


def looked(one: Member) -> Iterator[Finding]:
    """Tell what could not be looked at."""
    if one.no_info:
        yield Finding(
            "settings",
            NOTE,
            "Its memory, its role, its replicas and what it saves could not be looked at: "
            f"{one.no_info}",
            "Allow it: ACL SETUSER ... +info",
        )


def eviction(info: Mapping[str, str]) -> Iterator[Finding]:
    """Find a server that may evict locks, or that has no memory left to take more."""
    policy, most = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", 0))
    if policy != "noeviction" and most > 0:
        yield Finding(
            "eviction",
            SERIOUS,
            "The lock server may evict locks that are held when its memory is full "
            f"(maxmemory-policy {policy}).",
            "Set it to noeviction, or keep the locks on a server of their own (dislock_url).",
        )
    elif policy != "noeviction":
        yield Finding(
            "eviction",
            NOTE,
            f"maxmemory-policy is {policy}. Nothing is evicted as long as maxmemory is 0.",
            "Set it to noeviction before somebody sets maxmemory.",
        )
    elif most and int(info.get("used_memory", 0)) > most * NEARLY_FULL:
        yield Finding(
            "memory",
            WARNING,
            f"Its memory is nearly full: {info.get('used_memory_human')} of "
            f"{info.get('maxmemory_human')}. When it is full, no lock can be taken.",
            "Raise maxmemory, or keep the locks on a server of their own (dislock_url).",
        )


def role(info: Mapping[str, str]) -> Iterator[Finding]:
    """Find a server that takes no locks: a replica, or one that loads its data."""
    if info.get("role") == "slave":
        yield Finding(
            "role",
            SERIOUS,
            "The lock server is a replica, which takes no locks: every task is put off.",
            "Give the master's URL, or sentinel:// to follow it (dislock_url).",
        )
    if info.get("loading") == "1":
        left = info.get("loading_eta_seconds", "?")
        what = f"The lock server loads its data, for {left} s more, and takes no locks meanwhile."
        yield Finding("role", SERIOUS, what, "Wait.")


def persistence(one: Member, kind: str, *, parks: bool) -> Iterator[Finding]:
    """
    Find a server that forgets what must not be forgotten when it restarts.

    Args:
        one: The server.
        kind: Kind of the lock server.
        parks: Whether tasks are parked, or may be.
    """
    info = one.info
    if info.get("aof_last_write_status", "ok") != "ok":
        what = "It cannot write its append-only file, and refuses all locks."
        yield Finding("persistence", SERIOUS, what, "Look at its log, and at its disk.")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        what = "Its last snapshot failed. By default it then refuses all locks."
        yield Finding("persistence", SERIOUS, what, "Look at its log, and at its disk.")
    if "aof_enabled" not in info:
        return
    if info["aof_enabled"] == "1":
        if parks and one.config.get("appendfsync") == "no":
            what = "It leaves to the system when the append-only file is written (appendfsync no)."
            yield Finding("persistence", NOTE, what, "Set appendfsync to everysec.")
        return
    if parks:
        yield _forgets_parked_tasks(one.config.get("save"))
    elif kind == "quorum":
        yield Finding(
            "persistence",
            WARNING,
            "If it restarts, it has forgotten its leases and may grant them again (appendonly no).",
            "Set appendonly to yes and appendfsync to always, or start it again only after the "
            "longest timeout is over.",
        )


def _forgets_parked_tasks(save: str | None) -> Finding:
    remedy = "Set appendonly to yes: parked tasks exist nowhere else."
    if save is None:
        what = (
            "A crash loses the parked tasks that it has not saved (appendonly no). Whether it "
            "saves at all could not be looked at."
        )
        how = f"{remedy} To see what it saves: redis-cli CONFIG GET save"
        return Finding("persistence", WARNING, what, how)
    if save:
        what = f'A crash loses the tasks that were parked since the last snapshot (save "{save}").'
        return Finding("persistence", WARNING, what, remedy)
    what = "It saves nothing (appendonly no, no snapshots): a restart loses all parked tasks."
    return Finding("persistence", SERIOUS, what, remedy)


def replicas(info: Mapping[str, str], kind: str, wanted: int) -> Iterator[Finding]:
    """
    Find replicas that are missing or lag behind.

    Args:
        info: The fields of ``INFO``.
        kind: Kind of the lock server.
        wanted: ``dislock_min_replicas``.
    """
    if "connected_slaves" not in info or info.get("role") == "slave":
        return
    told = [_fields(value) for name, value in info.items() if _REPLICA.fullmatch(name)]
    online = [one for one in told if one.get("state") == "online"]
    late = [one for one in online if int(one.get("lag", 0)) > LAG]
    if len(online) - len(late) < wanted:
        yield Finding(
            "replicas",
            SERIOUS,
            f"dislock_min_replicas is {wanted}, and {len(online) - len(late)} replicas follow: no "
            "lock can be taken.",
            "Start the replicas, or lower dislock_min_replicas.",
        )
    elif kind in {"sentinel", "cluster"} and not online:
        what = "No replica follows it. If it fails, nothing takes over, and its locks are away."
        yield Finding("replicas", WARNING, what, "Start a replica; better two.")
    elif late:
        names = ", ".join(f"{one.get('ip')}:{one.get('port')}" for one in late)
        what = f"These replicas have not been heard of for {LAG} s: {names}."
        yield Finding("replicas", WARNING, what, "A failover to them loses the newest leases.")
    if kind == "sentinel" and online and "min_slaves_good_slaves" not in info:
        yield Finding(
            "replicas",
            WARNING,
            "A master that is cut off from its Sentinels goes on taking locks.",
            "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers.",
        )


def _fields(value: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in value.split(",") if "=" in part)


def round_trip(one: Member) -> Iterator[Finding]:
    """Tell how long a round trip takes."""
    if one.round_trips:
        took = median(one.round_trips)
        what = f"A round trip takes {took * 1000:.2g} ms, the median of {len(one.round_trips)}."
        if took < SLOW:
            yield Finding("round trip", OK, what)
        else:
            what += " Each locked task waits for two."
            yield Finding("round trip", WARNING, what, "Keep the lock server near the workers.")


def clocks(found: Sequence[Member], kind: str) -> Iterator[Finding]:
    """Compare the servers' clocks with each other, and with the clock here."""
    known = [(one.clock, one.name) for one in found if one.clock is not None]
    if not known:
        return
    (least, behind), (most, ahead) = min(known), max(known)
    apart = most - least
    names = [behind, ahead]
    if kind == "quorum" and apart > TOKENS_OFF:
        what = f"The servers' clocks are {apart:.2f} s apart: {behind} is behind, {ahead} ahead."
        remedy = "Let NTP set them: fencing tokens grow only as far as these clocks agree."
        yield Finding("clock", WARNING, what, remedy, names)
    elif apart > CLOCK_OFF:
        what = f"The clocks of the nodes are {apart:.1f} s apart: {behind} is behind, {ahead} ahead"
        remedy = "Let NTP set them: after a failover a lease may last longer, or shorter."
        yield Finding("clock", WARNING, f"{what}.", remedy, names)
    off = max((clock for clock, _ in known), key=abs)
    if abs(off) > CLOCK_OFF:
        way = "ahead of" if off > 0 else "behind"
        what = f"The lock server's clock is {abs(off):.1f} s {way} the clock here."
        remedy = "No lock depends on that, but times in logs do not match. Let NTP set both."
        yield Finding("clock", NOTE, what, remedy)
    else:
        what = f"The lock server's clock and the clock here are {abs(off):.3f} s apart."
        yield Finding("clock", OK, what)


def writes(server: Server, prefix: str) -> Iterator[Finding]:
    """Find a server that refuses to write, by trying.  A round trip to each server."""
    for name, send in server.members():
        try:
            tried = send(*TRY.by_text([], tried_in(prefix), "HSET"))
        except StoreError:
            continue  # another check says so
        why = next((text(part) for part in tried[1::2]), "")
        if REFUSES.search(why):
            why = why.partition("-")[2] if why.startswith("@") else why  # as Redis 6.2 writes it
            yield Finding(
                "writes",
                SERIOUS,
                f"It refuses to write, so no lock can be taken ({why}). Locks that are held can be "
                "renewed and released if it is only its memory that is full.",
                "Raise maxmemory, or keep the locks on a server of their own (dislock_url)."
                if "OOM" in why
                else "Look at its log, and at its disk.",
                [name],
            )


def rights(server: Server, prefix: str) -> Iterator[Finding]:
    """Find commands and keys that the server's user must be allowed.  A few round trips."""
    try:
        check_rights(server, prefix)
    except ForbiddenError as exc:
        what, _, remedy = exc.reason.partition("; ")
        told = f"On {exc.server}, {what}: some tasks fail, or no worker starts."
        yield Finding("rights", SERIOUS, told, f"{remedy[:1].upper()}{remedy[1:]}")
    except StoreError as exc:
        yield Finding("rights", NOTE, f"Rights could not be looked at: {exc}")
    else:
        yield Finding("rights", OK, "The server's user may do all that locks need.")


def about(
    server: Server, found: Sequence[Member], *, parks: bool, min_replicas: int
) -> Iterator[Finding]:
    """
    Judge what the lock server has told of itself.  No round trip.

    Args:
        server: The lock server.
        found: What :func:`members` has found.
        parks: Whether tasks are parked, or may be.
        min_replicas: ``dislock_min_replicas``.
    """
    yield from answering(server, found)
    for one in found:
        if one.away:
            continue
        for finding in (
            *version(one),
            *looked(one),
            *eviction(one.info),
            *role(one.info),
            *persistence(one, server.kind, parks=parks),
            *replicas(one.info, server.kind, min_replicas),
            *round_trip(one),
        ):
            yield finding._replace(about=[one.name])
    yield from clocks(found, server.kind)
