"""Locks that are broken on purpose: what the checker must catch, or it proves nothing.

Each is applied in the processes that work, before they take a lock.
"""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.beat import BeatLock
from celery_dislock.beat.reasons import StandBy
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.lease import Lease
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.scripts import (
    ACQUIRE,
    ACQUIRE_UNIQUE,
    BEGIN,
    DROP,
    FREE,
    GIVE_BACK,
    LEAVE,
    OVERRIDE,
    PARK,
    PARK_UNIQUE,
    PUT_BACK,
    RELEASE,
    RELEASE_DEAD,
    RELEASE_UNIQUE,
    RENEW,
    SWEEP,
    TICK,
    TICKS,
)
from celery_dislock.servers.connections import Wire
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.terms import Terms
    from celery_dislock.scripts import Script


def _rewrite(scripts: Sequence[Script], old: str, new: str) -> None:
    """Replace what is in the text of scripts; all who use one have the same object."""
    for script in scripts:
        assert old in script.text, old
        object.__setattr__(script, "text", script.text.replace(old, new))
        object.__setattr__(script, "sha", sha1(script.text.encode()).hexdigest())  # noqa: S324


# All scripts that can hand a lock on.
HAND_ON = (
    *(ACQUIRE, ACQUIRE_UNIQUE, PARK, PARK_UNIQUE, RELEASE, RELEASE_UNIQUE, RELEASE_DEAD),
    *(DROP, FREE, GIVE_BACK, LEAVE, OVERRIDE, PUT_BACK, SWEEP),
)


def release_without_looking_at_the_owner() -> None:
    """Delete the lock at each release, whoever has it by then."""
    _rewrite(
        [RELEASE],
        "local name, record = KEYS[1]",
        "redis.call('DEL', KEYS[1])\nlocal name, record = KEYS[1]",
    )


def a_renewal_that_revives() -> None:
    """Renew also what has ended."""
    _rewrite(
        [RENEW],
        "if not lease or lease.expires <= now then return 0 end",
        "lease = lease or {token = now_as_token, acquired = now, mode = 'x', holder = '{}'}",
    )


def an_acquisition_that_is_not_safe_to_send_twice() -> None:
    """Refuse an owner that has the lock already, as SET NX does when its reply was lost."""
    _rewrite([ACQUIRE], "  if mine then\n    renew(", "  if false then\n    renew(")


def a_done_mark_without_a_run() -> None:
    """Take a parked task out, and mark it as done, when it is given its turn."""
    _rewrite(
        [RELEASE, RELEASE_UNIQUE],
        "local function publish(lock, ticket, message, delay_ms)",
        "local function publish(lock, ticket, message, delay_ms)\n"
        "  forget(lock, ticket)\n  mark_done(lock, ticket)",
    )


def a_reservation_that_never_ends() -> None:
    """Keep a key reserved after its task has begun."""
    _rewrite(
        [BEGIN, ACQUIRE_UNIQUE, PARK_UNIQUE],
        "if ends == 'start' then it.state = '-'",
        "if ends == 'start' then it.state = 'w'",
    )


def trust_without_an_end() -> None:
    """Believe in a lease until its own process ends it."""
    setattr(Lease, "held", property(lambda lease: lease.end is None))


def a_watchdog_that_dies_at_its_first_error() -> None:
    """End the watchdog's thread when it meets an error, for ever."""
    report, start = Watchdog._report_outage, Watchdog.start  # noqa: SLF001
    died: set[Watchdog] = set()

    def die(watchdog: Watchdog, errors: list[StoreError]) -> None:
        report(watchdog, errors)
        if errors:
            died.add(watchdog)
            watchdog.stop()

    def start_once(watchdog: Watchdog) -> None:
        if watchdog not in died:
            start(watchdog)

    setattr(Watchdog, "_report_outage", die)
    setattr(Watchdog, "start", start_once)


def a_loss_that_nobody_is_told_of() -> None:
    """Take it for an outage when the server says that a lease is gone."""
    renew = Store.renew

    def deaf(*args: Any, **kwargs: Any) -> Any:
        return [answer or StoreError("?", "no reply") for answer in renew(*args, **kwargs)]

    setattr(Store, "renew", deaf)


def a_hand_off_that_forgets_the_token() -> None:
    """Give those who waited a token that is no newer."""
    wait = Store.wait

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        handed = wait(*args, **kwargs)
        return handed._replace(token=1) if handed else handed

    setattr(Store, "wait", forgetful)


def a_limit_that_is_one_higher() -> None:
    """Admit one lease more than the limit says."""
    acquire = Store.acquire

    def generous(*args: Any, terms: tuple[Terms, ...], **kwargs: Any) -> Any:
        more = tuple(one._replace(limit=one.limit + 1) for one in terms)
        return acquire(*args, terms=more, **kwargs)

    setattr(Store, "acquire", generous)


def a_cancelled_acquisition_that_stays() -> None:
    """Tell the server nothing of an attempt to take a lock that was interrupted."""
    finish = Wire.finish

    def finish_alone(*args: Any, undo: object = None, **kwargs: Any) -> Any:  # noqa: ARG001
        return finish(*args, **kwargs)

    setattr(Wire, "finish", finish_alone)
    setattr(Lock, "interrupted", lambda *_: None)


def beats_without_a_record() -> None:
    """Keep nothing of when the entries of a schedule were last sent."""
    write = "local function write_run("
    _rewrite([TICK, TICKS], write, f"local function write_run() end\n{write.replace('_', '_no_')}")


def a_message_that_is_never_noted() -> None:
    """Do not note that the message of a tick has gone out."""
    claim = "local entry, before = "
    _rewrite([TICK], claim, f"if ARGV[6] == '-' then return {{1}} end\n{claim}")


def a_beat_that_stands_by_for_ever() -> None:
    """Never lead after the first time that another beat leads, or the lock server is away."""
    take_over = BeatLock._take_over  # noqa: SLF001
    stand_by: set[BeatLock] = set()

    def once(beat: BeatLock) -> None:
        if beat in stand_by:
            raise StandBy
        stand_by.add(beat)
        take_over(beat)
        stand_by.remove(beat)

    setattr(BeatLock, "_take_over", once)


def a_lock_that_is_not_held_at_least() -> None:
    """End a lease at its release, however short it was."""
    read = "local owner, at_least_ms, ticket = ARGV[1], "
    _rewrite([RELEASE, RELEASE_UNIQUE], f"{read}tonumber(ARGV[2])", f"{read}0")


def a_hand_off_that_lasts() -> None:
    """Hand the lock to a waiter for its full timeout, in place of the time to take it up."""
    _rewrite(
        HAND_ON, "local take_up = math.min(place.ttl, TAKE_UP_MS)", "local take_up = place.ttl"
    )


def a_death_that_ends_no_lease() -> None:
    """Leave the lease of a dead pool process to expire."""
    _rewrite([RELEASE_DEAD], "if at_least_ms >= 0 then", "if false then")


def a_cap_that_is_never_reached() -> None:
    """Forget how often a lease was renewed."""
    setattr(Lease, "renewals", property(lambda _lease: 0, lambda _lease, _renewals: None))


def some_of_several_locks() -> None:
    """Keep what was taken of several locks, when another of them is held."""
    drop = "for _, taken in ipairs(new) do end_lease(taken, lease_of(taken, owner)) end"
    _rewrite([ACQUIRE, ACQUIRE_UNIQUE], drop, "")


def a_task_in_line_that_takes_the_first_lock_only() -> None:
    """Grant a task in line the first of its locks, and say that it has all."""
    grants = "answer[#answer + 1], answer[#answer + 2] = at.name, grant("
    _rewrite(
        [PARK, PARK_UNIQUE],
        f"{grants}at, owner, ttl, station.terms, holder)",
        "answer[#answer + 1] = at.name\n"
        "    answer[#answer + 1] = nth > 1 and now_as_token or "
        "grant(at, owner, ttl, station.terms, holder)",
    )


def a_start_that_is_not_counted() -> None:
    """Begin a body, and do not count it."""
    _rewrite(
        [PARK, PARK_UNIQUE],
        "local function count_start(lock, terms)",
        "local function count_start(lock, terms)\n  if true then return end",
    )


def a_message_that_is_never_replaced() -> None:
    """Run each message, also if a newer one has replaced it."""
    _rewrite(
        [BEGIN, ACQUIRE_UNIQUE, PARK_UNIQUE],
        "return it and it.mark == mark and number < math.max(it.confirmed, it.begun)",
        "return false",
    )


def an_older_task_that_begins_after_the_newest() -> None:
    """Let a task begin, also if one that was sent later and cancels it has begun."""
    _rewrite([PARK, PARK_UNIQUE], "canceller and newer_than(lock, canceller)", "nil")


RUN, SIMULATION = "a run", "the simulation"  # where a control is shown
FORGET = "forget the scripts"  # a fault that excuses nothing


class Control(NamedTuple):
    """
    A way to break the lock.

    Attributes:
        breaks: Breaks it in this process.
        promise: The promise that is broken then.
        shown_by: The one fault of the lock server that is made; empty: each of them.
        alone: Whether no other fault is made, as it would excuse what is to be shown.
        shown_in: Where: a run, the simulation, or both.
    """

    breaks: Callable[[], None]
    promise: str
    shown_by: str = ""
    alone: bool = False
    shown_in: tuple[str, ...] = (RUN,)


BOTH = (RUN, SIMULATION)

CONTROLS: dict[str, Control] = {
    control.breaks.__name__: control
    for control in (
        Control(release_without_looking_at_the_owner, "exclusion"),
        Control(a_renewal_that_revives, "exclusion", "delete everything"),
        Control(
            an_acquisition_that_is_not_safe_to_send_twice,
            "free",
            "lose the replies of three scripts",
        ),
        Control(trust_without_an_end, "exclusion"),
        Control(a_loss_that_nobody_is_told_of, "exclusion", "delete everything"),
        Control(a_watchdog_that_dies_at_its_first_error, "kept"),
        Control(a_hand_off_that_forgets_the_token, "token"),
        # A server that forgets would excuse these.
        Control(a_done_mark_without_a_run, "nothing lost", FORGET),
        Control(beats_without_a_record, "tick", "let no byte through"),
        Control(a_message_that_is_never_noted, "again", "let no byte through"),
        Control(a_beat_that_stands_by_for_ever, "silent"),
        Control(a_reservation_that_never_ends, "free"),
        Control(a_limit_that_is_one_higher, "exclusion"),
        Control(a_task_in_line_that_takes_the_first_lock_only, "kept", FORGET),
        Control(a_start_that_is_not_counted, "rate", FORGET),
        Control(a_cancelled_acquisition_that_stays, "free", FORGET, alone=True),
        Control(a_lock_that_is_not_held_at_least, "at least", shown_in=BOTH),
        Control(a_hand_off_that_lasts, "take-up", shown_in=(SIMULATION,)),
        Control(a_death_that_ends_no_lease, "crash", FORGET, alone=True, shown_in=BOTH),
        Control(a_cap_that_is_never_reached, "cap", shown_in=BOTH),
        Control(some_of_several_locks, "all or none", FORGET, alone=True, shown_in=BOTH),
        Control(a_message_that_is_never_replaced, "newest"),
        Control(an_older_task_that_begins_after_the_newest, "takes over", FORGET, shown_in=BOTH),
    )
}
