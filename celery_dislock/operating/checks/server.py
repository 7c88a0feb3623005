"""Examine the lock server: its settings, its replicas, its clock, and how fast it answers."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING

from celery_dislock.exceptions import ForbiddenError
from celery_dislock.operating.checks.table import Table
from celery_dislock.operating.findings import note, ok, serious, warning
from celery_dislock.scripts import TRY
from celery_dislock.servers.permissions import check_rights, tried_in
from celery_dislock.servers.records import text
from celery_dislock.worker.startup import evicts, is_replica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.checks.facts import Facts, Member
    from celery_dislock.operating.findings import Finding

OLDEST = (6, 2)  # version of Redis
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

TABLE = Table()


@TABLE.check("server")
def answers(facts: Facts) -> Iterator[Finding]:
    """Tell what kind of server it is, and which processes of it do not answer."""
    away = [one for one in facts.members if one.away]
    names = [one.name for one in away]
    why = "; ".join(f"{one.name}: {one.away}" for one in away)
    if facts.away:
        yield serious(
            f"The lock server is away, and no task can take a lock: {why}",
            "Start it, or name another one (dislock_url, --dislock-url).",
            names,
        )
    elif away and facts.server.kind == "quorum":
        more = (len(facts.members) - 1) // 2 - len(away)
        yield warning(
            f"{len(away)} of {len(facts.members)} lock servers do not answer ({why}). "
            f"{f'{more} more' if more else 'No other'} may fail.",
            "Start it again.",
            names,
        )
    elif away:
        what = f"Locks in the slots of these nodes cannot be taken or renewed: {why}"
        yield serious(what, "Start it again.", names)
    for one in facts.answering:
        version = one.info.get("redis_version", "of an unknown version")
        name = "Valkey" if "valkey" in one.info.get("server_name", "") else "Redis"
        version = one.info.get("valkey_version", version)
        yield ok(f"{one.name} is {KINDS[facts.server.kind]}: {name} {version}.")


@TABLE.check("rights")
def rights(facts: Facts) -> Iterator[Finding]:
    """Find commands and keys that the server's user must be allowed.  A few round trips."""
    if facts.away:
        return
    try:
        check_rights(facts.server, facts.prefix)
    except ForbiddenError as exc:
        what, _, remedy = exc.reason.partition("; ")
        what = f"On {exc.server}, {what}: some tasks fail, or no worker starts."
        yield serious(what, f"{remedy[:1].upper()}{remedy[1:]}")
    else:
        yield ok("The server's user may do all that locks need.")


@TABLE.check_each("writes")
def writes(one: Member, facts: Facts) -> Iterator[Finding]:
    """Find a server that refuses to write, by trying.  A round trip."""
    if facts.away or one.send is None:
        return
    tried = one.send(*TRY.by_text([], tried_in(facts.prefix), "HSET"))
    why = next((text(part) for part in tried[1::2]), "")
    if REFUSES.search(why):
        why = why.partition("-")[2] if why.startswith("@") else why  # as Redis 6.2 writes it
        yield serious(
            f"It refuses to write, so no lock can be taken ({why}). Locks that are held can be "
            "renewed and released if it is only its memory that is full.",
            "Raise maxmemory, or keep the locks on a server of their own (dislock_url)."
            if "OOM" in why
            else "Look at its log, and at its disk.",
        )


@TABLE.check("sentinels")
def sentinels(facts: Facts) -> Iterator[Finding]:
    """Find Sentinels that cannot name the master.  Blocks for the timeout of each."""
    asked: list[tuple[str, str]] = getattr(facts.server, "watchers", list)()
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


@TABLE.check_each("version")
def version(one: Member, _: Facts) -> Iterator[Finding]:
    """Find a server that is too old."""
    known = one.info.get("redis_version", "")
    numbers = tuple(int(part) for part in known.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        what = f"Redis {known} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that is tested."
        yield warning(what, "Update it.")


@TABLE.check_each("settings")
def settings(one: Member, _: Facts) -> Iterator[Finding]:
    """Tell what could not be looked at."""
    if one.no_info:
        yield note(
            "Its memory, its role, its replicas and what it saves could not be looked at: "
            f"{one.no_info}",
            "Allow it: ACL SETUSER ... +info",
        )


@TABLE.check_each("eviction")
def eviction(one: Member, _: Facts) -> Iterator[Finding]:
    """Find a server that may evict locks, or would as soon as its memory is bounded."""
    policy = one.info.get("maxmemory_policy", "noeviction")
    if found := evicts(one.info):
        yield serious(*found)
    elif policy != "noeviction":
        yield note(
            f"maxmemory-policy is {policy}. Nothing is evicted as long as maxmemory is 0.",
            "Set it to noeviction before somebody sets maxmemory.",
        )


@TABLE.check_each("memory")
def memory(one: Member, _: Facts) -> Iterator[Finding]:
    """Find a server that has no memory left to take more locks."""
    info, most = one.info, int(one.info.get("maxmemory", 0))
    if not evicts(info) and most and int(info.get("used_memory", 0)) > most * NEARLY_FULL:
        yield warning(
            f"Its memory is nearly full: {info.get('used_memory_human')} of "
            f"{info.get('maxmemory_human')}. When it is full, no lock can be taken.",
            "Raise maxmemory, or keep the locks on a server of their own (dislock_url).",
        )


@TABLE.check_each("role")
def role(one: Member, _: Facts) -> Iterator[Finding]:
    """Find a server that takes no locks: a replica, or one that loads its data."""
    if found := is_replica(one.info):
        yield serious(*found)
    if one.info.get("loading") == "1":
        left = one.info.get("loading_eta_seconds", "?")
        what = f"The lock server loads its data, for {left} s more, and takes no locks meanwhile."
        yield serious(what, "Wait.")


@TABLE.check_each("persistence")
def persistence(one: Member, facts: Facts) -> Iterator[Finding]:
    """Find a server that forgets what must not be forgotten when it restarts."""
    remedy = "Set appendonly to yes: parked tasks exist nowhere else."
    if one.info.get("aof_enabled") != "0":  # or not known
        return
    if not facts.parks:
        if facts.server.kind == "quorum":
            yield warning(
                "If it restarts, it has forgotten its leases and may grant them again "
                "(appendonly no).",
                "Set appendonly to yes and appendfsync to always, or start it again only after "
                "the longest timeout is over.",
            )
    elif one.save is None:
        yield warning(
            "A crash loses the parked tasks that it has not saved (appendonly no). Whether it "
            "saves at all could not be looked at.",
            f"{remedy} To see what it saves: redis-cli CONFIG GET save",
        )
    elif one.save:
        since = f'since the last snapshot (save "{one.save}")'
        yield warning(f"A crash loses the tasks that were parked {since}.", remedy)
    else:
        what = "It saves nothing (appendonly no, no snapshots): a restart loses all parked tasks."
        yield serious(what, remedy)


@TABLE.check_each("replicas")
def replicas(one: Member, facts: Facts) -> Iterator[Finding]:
    """Find replicas that are missing or lag behind."""
    info, kind, wanted = one.info, facts.server.kind, facts.min_replicas
    if "connected_slaves" not in info or info.get("role") == "slave":
        return
    described = [
        dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        for name, value in info.items()
        if _REPLICA.fullmatch(name)
    ]
    online = [replica for replica in described if replica.get("state") == "online"]
    late = [replica for replica in online if int(replica.get("lag", 0)) > LAG]
    follow = len(online) - len(late)
    if follow < wanted:
        yield serious(
            f"dislock_min_replicas is {wanted}, and {follow} replicas follow: no lock can be "
            "taken.",
            "Start the replicas, or lower dislock_min_replicas.",
        )
    elif kind in {"sentinel", "cluster"} and not online:
        what = "No replica follows it. If it fails, nothing takes over, and its locks are away."
        yield warning(what, "Start a replica; better two.")
    elif late:
        names = ", ".join(f"{replica.get('ip')}:{replica.get('port')}" for replica in late)
        what = f"These replicas have not been heard of for {LAG} s: {names}."
        yield warning(what, "A failover to them loses the newest leases.")
    if kind == "sentinel" and online and "min_slaves_good_slaves" not in info:
        yield warning(
            "A master that is cut off from its Sentinels goes on taking locks.",
            "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers.",
        )


@TABLE.check_each("round trip")
def round_trip(one: Member, _: Facts) -> Iterator[Finding]:
    """Tell how long a round trip takes."""
    if one.round_trips:
        took = median(one.round_trips)
        what = f"A round trip takes {took * 1000:.2g} ms, the median of {len(one.round_trips)}."
        if took < SLOW:
            yield ok(what)
        else:
            what += " Each locked task waits for two."
            yield warning(what, "Keep the lock server near the workers.")


@TABLE.check("clock")
def clocks(facts: Facts) -> Iterator[Finding]:
    """Compare the servers' clocks with each other, and with the clock here."""
    known = [(one.clock, one.name) for one in facts.members if one.clock is not None]
    if not known:
        return
    (least, behind), (most, ahead) = min(known), max(known)
    quorum = facts.server.kind == "quorum"
    if most - least > (TOKENS_OFF if quorum else CLOCK_OFF):
        yield warning(
            f"The servers' clocks are {most - least:.2f} s apart: {behind} is behind, {ahead} "
            "ahead.",
            "Let NTP set them: fencing tokens grow only as far as these clocks agree."
            if quorum
            else "Let NTP set them: after a failover a lease may last longer, or shorter.",
            [behind, ahead],
        )
    off = max((clock for clock, _ in known), key=abs)
    if abs(off) > CLOCK_OFF:
        way = "ahead of" if off > 0 else "behind"
        what = f"The lock server's clock is {abs(off):.1f} s {way} the clock here."
        remedy = "No lock depends on that, but times in logs do not match. Let NTP set both."
        yield note(what, remedy)
    else:
        yield ok(f"The lock server's clock and the clock here are {abs(off):.3f} s apart.")
