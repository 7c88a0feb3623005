"""The sentence of each state in which a task can be.

A function here looks at one kind of evidence, and returns the answer.  It returns None if the
evidence is out of date, or tells nothing.  What is not known is not guessed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import body_owners_start
from celery_dislock.keys.templates import key_of
from celery_dislock.operating.checks.table import number
from celery_dislock.operating.checks.troubles import OVERDUE, troubles_of, unclaimed
from celery_dislock.operating.inspection import RESERVED, SCHEDULED
from celery_dislock.scripts.names import ASIDE, PLACES, REPLACED, TICKETS
from celery_dislock.servers.find import LEASES
from celery_dislock.servers.waiters import ticket_of_member
from celery_dislock.words import as_argument, filled, for_people, plain, some, time_of_day

if TYPE_CHECKING:
    from celery_dislock.operating.why.case import Case
    from celery_dislock.servers.find import TaskRecord
    from celery_dislock.servers.view import Holder, LockState
    from celery_dislock.servers.waiters import Place, Standing, Waiter
    from celery_dislock.tasks.answer import Answer

FOLLOWED = 10  # locks that are looked at, from one that is kept to the next
ORDINALS = {1: "st", 2: "nd", 3: "rd"}  # codespell:ignore nd
# Troubles of a lock because of which a task may not get the lock.
IN_THE_WAY = {"overdue", "no worker", "unclaimed", "stuck", "hung", "differs", "paused", "limited"}
THEN = "It starts by itself then."
# What makes a task in line run, if nothing is wrong with its lock; by the state.
NEXT = {
    "too early": f"{THEN} For more starts: celery dislock limit KEY --rate RATE",
    "held back": f"{THEN} To end that sooner: celery dislock resume KEY",
}
BY_TURNS = "It starts when its turn comes. More of the lock: celery dislock show KEY"


def nth(number: int) -> str:
    """Write an ordinal: ``2nd``."""
    is_teen = number % 100 in {11, 12, 13}
    return f"{number}{'th' if is_teen else ORDINALS.get(number % 10, 'th')}"


def at(unix_time: float) -> str:
    """Write a time as a clock here shows it, and how far from now it is."""
    left = unix_time - time.time()
    clock = time_of_day(unix_time)
    if clock == "?":
        return clock
    return f"{clock}, in {for_people(left)}" if left >= 0 else f"{clock}, {for_people(-left)} ago"


# A record on the lock server names the task.


def of_record(case: Case, found: TaskRecord) -> Answer | None:
    """Tell what a record that names the task says of it."""
    if found.end == TICKETS:
        return of_parked(case, found.lock, found.name)
    if found.end == LEASES:
        return of_lease(case, found)
    if found.end == PLACES:
        return in_its_slot(case, found)
    if found.end == REPLACED:
        return replaced(case, found)
    return set_aside(case, found) if found.end == ASIDE else None


def of_lease(case: Case, found: TaskRecord) -> Answer | None:
    """Tell that the task runs; or of a parked task, that it keeps this lock."""
    lock = case.overview.lock(found.lock)
    owner = found.name.removeprefix("~")
    holder = next((holder for holder in lock.holders if holder.owner == owner), None)
    if holder is None or holder.expiring:
        return None
    if holder.turn:
        ticket, beside = ticket_of_member(owner.encode())
        return of_parked(case, beside or found.lock, ticket)
    its_place = None if holder.is_overdue else case.place()
    waits = its_place and in_its_slot(case, its_place)
    return waits or running(case, lock, holder)


def running(case: Case, lock: LockState, holder: Holder) -> Answer:
    """The task holds its lock, and the lease is renewed, or is not renewed any more."""
    who, held = case.who(holder.task), for_people(holder.held)
    place = f"{holder.worker or holder.host or '?'} (pid {holder.pid or '?'})"
    facts = [
        f"lock server: its lease ends in {for_people(holder.remaining)} unless renewed",
        f"lock server: its lease costs {holder.cost:,}" if holder.cost > 1 else "",
        f"lock server: {lock.waiting} wait for the lock" if lock.waiting else "",
    ]
    about = {
        "worker": holder.worker,
        "pid": holder.pid,
        "held_for": holder.held,
        "renewed": holder.renewed,
        "cost": holder.cost,
        "waiting": lock.waiting,
    }
    more: dict[str, Any] = {"task": holder.task, "key": lock.key, "about": about}
    if holder.is_overdue:
        sentence = (
            f"{who} has held lock {lock.key!r} on {place} for {held}, and not renewed it for "
            f"{for_people(holder.renewed)}: its process is dead, stopped or cut off, or it has "
            "renewed it as often as it may."
        )
        remedy = filled(OVERDUE.remedy, KEY=lock.argument)
        return case.answer("overdue", sentence, facts, remedy, **more)
    renewed = "with a fixed expiry"
    if holder.renewed is not None:
        renewed = f"last renewed {for_people(holder.renewed)} ago"
    sentence = f"{who} runs on {place}: it has held lock {lock.key!r} for {held}, {renewed}."
    hung = next(
        (trouble for trouble in troubles_of(lock, case.site) if trouble.name == "hung"), None
    )
    free = f"celery dislock free --terminate {lock.argument}"
    remedy = f"It runs. If its body hangs: {free}"
    if holder.superseded is not None:
        facts.append(f"lock server: task {plain(holder.superseded)} waits for it to end")
        about["superseded"] = holder.superseded
        remedy = f"It is cancelled if its task has a lock_on_cancel. If it goes on: {free}"
    if hung is not None:
        facts.append(f"lock server: {hung.row.what}")
        remedy = filled(hung.row.remedy, KEY=lock.argument)
    return case.answer("running", sentence, facts, remedy, **more)


# The task waits.


def of_parked(case: Case, lock: str, ticket: str) -> Answer | None:
    """Tell of a parked task where it stands, or that it has its turn."""
    found = case.search.where(lock, f"{ticket}#")
    if found is None:
        return None
    return sentence_in_line(case, found) if found.turn_ends is None else with_turn(case, found)


def in_its_slot(case: Case, found: TaskRecord) -> Answer | None:
    """Tell of a task that waits in a worker's slot: for its own lock, or for one of its body."""
    waits = case.search.where(found.lock, found.name)
    if waits is None:
        return None
    where = "body" if found.name.startswith(body_owners_start(case.id)) else "slot"
    return sentence_in_line(case, waits, f"in its {where} {waits.waiter.who.rpartition('] ')[2]}")


def sentence_in_line(case: Case, found: Standing, slot: str = "") -> Answer:
    """The task is nth in line, perhaps in a slot of a worker, and something is in the way."""
    waiter, place, lock = found.waiter, found.place, case.overview.lock(found.lock)
    if found.is_lost:
        sentence = (
            f"{case.who(waiter.task)} is parked for lock {lock.key!r}, and has lost its place: the "
            "next sweep of a worker gives it its turn again."
        )
        remedy = "If no worker runs, start one with --dislock."
        return case.answer("in line", sentence, (), remedy, task=waiter.task, key=lock.key)
    state, way, cause = in_the_way(case, lock)
    several = waiter.stations
    of_several = f" (the {nth(len(waiter.keeps) + 1)} of its {len(several)} locks)"
    keeps = f"; it keeps {some(map(repr, waiter.keeps))} meanwhile" if waiter.keeps else ""
    standing = f"{nth(place.nth)} of {place.of}" if place.of > 1 else "alone"
    if slot:
        standing = f"waits {slot}, {standing}"
        state = "waiting in its slot" if state == "in line" else state
    sentence = (
        f"{case.who(waiter.task)} {'' if slot else 'is '}{standing} in line for lock {lock.key!r}"
        f"{of_several if several else ''}, {way}{keeps}."
    )
    first = lock.line[0] if lock.line and place.nth > 1 else None
    facts = [f"lock server: it waits for {for_people(waiter.waiting)}", _starts(waiter, place)]
    if first is not None:
        facts.append(f"lock server: {first.who} is the first, for {for_people(first.waiting)}")
    facts += [f"lock server: {told}" for told in (lock.words, lock.lack) if told]
    at_fault = {
        trouble: where
        for where in (cause, lock)
        for trouble in troubles_of(where, case.site)
        if trouble.name in IN_THE_WAY
    }
    troubles = list(at_fault)
    facts += [
        f"lock server: {trouble.row.what}{': ' if trouble.more else ''}{trouble.more}"
        for trouble in troubles
    ]
    remedy, in_trouble = NEXT.get(state, BY_TURNS), cause
    if troubles:
        remedy, in_trouble = troubles[0].row.remedy, at_fault[troubles[0]]
    blocks = next(
        iter(unclaimed(in_trouble)), waiter
    )  # another may be in the way, and is to be dropped
    remedy = filled(remedy, KEY=in_trouble.argument, TICKET=as_argument(blocks.ticket))
    about = {
        "place": place.nth,
        "waiting": place.of,
        "starts_in": place.starts_in,
        "is_estimate": place.is_estimate,
        "waits_for": waiter.waiting,
        "cost": waiter.cost,
        "stations": list(several),
        "keeps": list(waiter.keeps),
        "queue": waiter.routing_key,
        "because_of": cause.key,
        "troubles": [trouble.name for trouble in troubles],
    }
    return case.answer(state, sentence, facts, remedy, task=waiter.task, key=lock.key, about=about)


def _starts(waiter: Waiter, place: Place) -> str:
    """Say when a parked task starts; empty: it is not known, or at any moment."""
    if not place.starts_in:
        return ""
    when = for_people(place.starts_in)
    if place.is_estimate:
        by_cost = waiter.cost > 1  # of a limit with costs nothing is known
        by = "if those before it cost as much" if by_cost else "by how long the last bodies took"
        when = f"about {when}, {by}"
    return f"lock server: it may start in {when}"


def in_the_way(case: Case, lock: LockState) -> tuple[str, str, LockState]:
    """
    Say why the next in line does not get a lock.

    Returns:
        The state in a word, a clause about the lock, and the lock that is the cause: if all units
        are kept by tasks that wait for other locks, the one at the end of that way.
    """
    ways: list[str] = []
    state, way = _state_of(lock)
    while state == "in line" and _is_kept(lock) and len(ways) < FOLLOWED:
        oldest = max(lock.holders, key=lambda holder: holder.held)
        try:
            beyond = case.overview.lock(lock.beyond(oldest))
        except StoreError:  # it is damaged, or away
            break
        ways.append(way)
        lock, (state, way) = beyond, _state_of(beyond)
    return state, ", ".join([*ways, way]), lock


def _is_kept(lock: LockState) -> bool:
    return bool(lock.holders) and all(holder.is_kept for holder in lock.holders)


def _state_of(lock: LockState) -> tuple[str, str]:
    """Say in a word, and in a clause, what state a lock is in."""
    rate = lock.rate
    if lock.is_paused:
        note = f" ({lock.limit_note})" if lock.limit_note else ""
        return "paused", f"which is paused{note}, for {for_people(lock.limit_age)} so far"
    if rate is not None and rate.held_back:
        note = f" ({rate.back_note})" if rate.back_note else ""
        return "held back", f"which is held back for {for_people(rate.held_back)} more{note}"
    if rate is not None and rate.early:
        soon = at(time.time() + rate.early)
        by = f", set by an operator{f' ({rate.note})' if rate.note else ''}," if rate.is_set else ""
        return "too early", f"whose rate of {rate.rate}{by} admits the next start at {soon}"
    return "in line", _held_by(lock) if lock.holders else "which nobody holds now"


def _held_by(lock: LockState) -> str:
    bodies = [holder for holder in lock.holders if not holder.turn]
    longest = max(bodies or lock.holders, key=lambda holder: holder.held)
    several = len(lock.holders) > 1
    held = f"for {for_people(longest.held)}"
    if longest.turn:
        is_for = f"is {'kept' if longest.is_kept else 'reserved'} {held} so far for {longest.who}"
        return (
            f"which {len(lock.holders)} hold; the oldest unit {is_for}"
            if several
            else f"which {is_for}"
        )
    who = f"{len(lock.holders)} hold; the oldest, {longest.who}," if several else longest.who
    if longest.is_overdue:
        return f"which {who} has held {held}, and not renewed for {for_people(longest.renewed)}"
    return f"which {who} has held {held}"


def with_turn(case: Case, found: Standing) -> Answer:
    """The task may start, and its message is on its way to a worker."""
    waiter, key = found.waiter, key_of(found.lock)
    who, queue, told = case.who(waiter.task), waiter.routing_key or "?", case.told
    holders = case.overview.lock(found.lock).holders
    held = [holder.held for holder in holders if holder.owner == f"{waiter.ticket}#"]
    since = f", for {for_people(held[0])}" if held else ""
    turn = f"{who} has its turn for lock {key!r}{since}"
    again = f" (the {nth(waiter.turns)})" if waiter.turns > 1 else ""
    remedy = "It starts when a worker takes its message."
    if (worker := told.having) is not None:
        what = {
            SCHEDULED: f"waits there until {at(worker.eta or time.time())}",
            RESERVED: "waits there for a free slot",
        }.get(worker.has, "is about to start there")
        sentence = f"{turn}{again}: its message is with {worker.name}, and {what}."
    elif told.workers and not told.serving(queue):
        sentence = f"{turn}{again}, and no worker that answers consumes its queue {queue!r}."
        remedy = f"Start a worker of that queue: celery worker --dislock -Q {as_argument(queue)}"
    else:
        nobody = "no worker answers" if told.nobody else "no worker has taken it yet"
        sentence = f"{turn}{again}: its message is in queue {queue!r}, and {nobody}."
    messages = None if told.unknown else case.site.messages_in([queue])
    facts = [
        f"lock server: this turn ends in {for_people(found.turn_ends)}, and then comes again",
        f"broker: {number(messages, 'message')} in queue {queue!r}" if messages is not None else "",
    ]
    about = {"turns": waiter.turns, "queue": queue, "consumers": told.serving(queue)}
    more = {"task": waiter.task, "key": key, "about": about}
    return case.answer("has its turn", sentence, facts, remedy, **more)


# The task was taken out of line.


def replaced(case: Case, found: TaskRecord) -> Answer:
    """The task was replaced in line, and its end is not reported yet."""
    key = key_of(found.lock)
    sentence = (
        f"{case.who()} has lost its place in line for lock {key!r}, as it was dropped or a newer "
        "task has taken it, and does not run."
    )
    remedy = "Its result says so when a worker has swept the line. To run it, send it again."
    return case.answer("replaced", sentence, (), remedy, key=key)


def set_aside(case: Case, found: TaskRecord) -> Answer:
    """The task was set aside, as nobody could read or run it."""
    key, why = key_of(found.lock), case.stored.reason
    because = f": {why}" if why else ", because no worker could read or run it"
    sentence = f"{case.who()} was set aside in the line of lock {key!r}{because}."
    command = f"celery dislock put-back --ticket {as_argument(found.name)} {as_argument(key)}"
    try:
        lack = [plain(worker) for worker in case.lacking(found)]
        remedy = f"When a worker can run it: {command}"
        if lack:
            remedy = f"When these workers of its queue have its task, too: {some(lack)}: {command}"
    except ValueError as exc:
        remedy = f"It cannot be put back, as its message is lost: {plain(str(exc))}. Send it again."
    facts = [] if why else ["log: the worker that set it aside has logged why"]
    return case.answer("set aside", sentence, facts, remedy, key=key)
