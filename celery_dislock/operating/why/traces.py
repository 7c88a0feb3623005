"""The sentences of tasks that have no place and no lease: ended, put off, sent, or not known."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states

from celery_dislock.keys.names import task_id_of_reserved
from celery_dislock.keys.templates import key_of
from celery_dislock.operating.checks.table import number
from celery_dislock.operating.checks.troubles import TROUBLES, unmet
from celery_dislock.operating.inspection import ACTIVE, RESERVED
from celery_dislock.operating.why.sentences import THEN, at, in_the_way, nth, of_record
from celery_dislock.parking.answers import PARKED
from celery_dislock.scripts.names import DONE, RUNNING, UNIQUE, UNSENT
from celery_dislock.servers.records import decode
from celery_dislock.words import as_argument, filled, for_people

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.operating.why.asked import Worker
    from celery_dislock.operating.why.case import Case
    from celery_dislock.servers.view import LockState, ReservationState
    from celery_dislock.tasks.answer import Answer

SEND_AGAIN = "It does not run any more. To run it, send it again."
(UNMET,) = (trouble for trouble in TROUBLES if trouble.name == "unmet")
ENDS = {
    states.SUCCESS: "has run, and has succeeded",
    states.FAILURE: "has failed",
    states.REVOKED: "was revoked",
    states.REJECTED: "was rejected",
    states.IGNORED: "was ignored",
}


def ended(case: Case) -> Answer | None:
    """Its result says how the task has ended, and when."""
    stored = case.stored
    if stored.state not in ENDS:
        return None
    when = f", at {at(stored.at)}" if stored.at else ""
    says_more = stored.reason not in {"", "revoked"}
    why = f": {stored.reason}" if says_more else ""
    sentence = f"{case.who()} {ENDS[stored.state]}{when}{why}"
    done = stored.state == states.SUCCESS
    about = {"result": stored.state, "at": stored.at}
    remedy = "" if done else SEND_AGAIN
    return case.answer("ended", f"{sentence.rstrip('.')}.", (), remedy, about=about)


# A worker has the task.


def with_worker(case: Case) -> Answer | None:
    """A worker says that it has the task."""
    worker = case.told.having
    if worker is None:
        return None
    names = case.runtime.lock_names(worker.keys)
    for found in () if case.away else case.search.among(names):  # the task may stand in line by now
        if found.is_certain and (answer := of_record(case, found)):
            return answer
    if worker.has == ACTIVE:
        return _active(case, worker)
    return _waiting(case, worker)


def _waiting(case: Case, worker: Worker) -> Answer:
    who, tell = case.who(worker.task), partial(_of_worker, case, worker)
    if worker.revoked:
        sentence = f"{who} is revoked, and {worker.name} discards it when its time comes."
        return tell("revoked", sentence, SEND_AGAIN)
    if worker.has == RESERVED:
        sentence = f"{who} is with {worker.name}, and waits for a free slot of its pool."
        remedy = "It starts when a task there ends. More slots: another worker, or --concurrency"
        return tell("received", sentence, remedy)
    stored = case.stored if case.stored.reason else case.ask_backend_again()
    until = f"until {at(worker.eta)}" if worker.eta else "for some time"
    if not (worker.put_off or stored.state == states.RETRY):
        sentence = (
            f"{who} is with {worker.name} {until}: that is when its sender wants it to start."
        )
        return tell("not due", sentence, "It starts by itself then.")
    count = f", for the {nth(worker.put_off)} time" if worker.put_off > 1 else ""
    sentence = f"{who} is put off {until}{count}: {_why_put_off(case, worker.keys)}."
    return tell("put off", sentence, "It comes by itself then.")


def _of_worker(case: Case, worker: Worker, state: str, sentence: str, remedy: str) -> Answer:
    """Make the answer that a worker has given."""
    key = next(iter(worker.keys), None)
    about = {"worker": worker.name, "pid": worker.pid, "keys": worker.keys, "until": worker.eta}
    facts = [f"workers: {worker.name} has it: {worker.has}"]
    return case.answer(state, sentence, facts, remedy, task=worker.task, key=key, about=about)


def _active(case: Case, worker: Worker) -> Answer:
    tell = partial(_of_worker, case, worker)
    for_time = f", for {for_people(time.time() - worker.since)} so far" if worker.since else ""
    runs = f"{case.who(worker.task)} runs on {worker.name} (pid {worker.pid or '?'}){for_time}"
    if not worker.locks:
        sentence = f"{runs}, without its lock: locks are off there (--no-dislock)."
        remedy = "It runs. To have it locked, start that worker with --dislock."
        return tell("locks off", sentence, remedy)
    if not worker.keys:
        return tell("running", f"{runs}, and takes no lock.", "It runs.")
    keys = ", ".join(map(repr, worker.keys))
    if case.away:
        return tell("running", f"{runs}; whether it holds lock {keys} is not known.", "It runs.")
    sentence = (
        f"{runs}, and does not hold its lock {keys}: it begins or ends at this moment, or its "
        "lease was lost, freed or capped (max_renew_times)."
    )
    end = f"celery control terminate KILL {as_argument(case.id)}"
    remedy = f"It runs, perhaps beside another. To end it: {end}"
    return tell("running without its lock", sentence, remedy)


def _why_put_off(case: Case, keys: Sequence[str]) -> str:
    """Return the reason in its result; if it has none, what is in the way of its locks now."""
    if case.stored.reason:
        return case.stored.reason.rstrip(".")
    if keys and not case.away:
        for name in case.runtime.lock_names(keys):
            lock = case.overview.lock(name)
            if lock.exists:
                return f"why is not stored; it needs lock {lock.key!r}, {in_the_way(case, lock)[1]}"
    return "why is not stored; the log of the worker that put it off says so"


# No worker has the task, but its result or a record on the lock server names it.


def retried(case: Case) -> Answer | None:
    """Its result says that the task comes again, and no worker that answers has it."""
    if case.stored.state != states.RETRY:
        return None
    sentence = (
        f"{case.who()} is put off, and its message is with the broker or with a worker that has "
        f"not answered: {_why_put_off(case, ())}."
    )
    remedy = "It comes by itself. If no worker runs, start one."
    return case.answer("put off", sentence, (), remedy)


def reserved(case: Case) -> Answer | None:
    """Its key is reserved for its message."""
    found = case.first(UNIQUE)
    lock = None if found is None else case.overview.lock(found.lock)
    record = lock and lock.reservation
    if lock is None or record is None or record.id != case.id:
        return None
    who, since, left = case.who(), for_people(record.since), for_people(record.remaining)
    facts = [f"lock server: key {lock.key!r} is reserved for it ({record.state}) for {left} more"]
    about = {"reserved": record.state, "since": record.since}
    more: dict[str, Any] = {"key": lock.key, "about": about}
    if record.state == "being sent":
        sentence = f"{who} is being sent at this moment, or its sender has died."
        remedy = f"If its sender has died, the key is free in {left}, and it can be sent again."
        return case.answer("being sent", sentence, facts, remedy, **more)
    if record.state == "ended":
        sentence = f"{who} has ended {since} ago; its key {lock.key!r} stays reserved."
        return case.answer("ended", sentence, facts, SEND_AGAIN, **more)
    if record.state == "running":
        sentence = (
            f"{who} has begun, and holds no lock that is known here: it has just ended, or its "
            "process has died."
        )
        end = f"celery dislock free --reservation {lock.argument}"
        remedy = f"If it has died, its key is free in {left}, or by: {end}"
        return case.answer("began", sentence, facts, remedy, **more)
    return _sent(case, facts, more, lock, record)


def _sent(
    case: Case, facts: list[str], more: dict[str, Any], lock: LockState, record: ReservationState
) -> Answer:
    """Its message waits with the broker, or is lost."""
    was_sent = f"{case.who()} was sent {for_people(record.since)} ago"
    told, (since, tasks) = case.told, unmet(record, case.site.tasks_of(lock.key))
    queues = sorted({task.queue for task in tasks})
    messages = case.site.messages_in(queues) if queues and not told.unknown else None
    nobody = "no worker answers" if told.nobody else "no worker that answers has it"
    if messages == 0 and since < 0:
        sentence = (
            f"{was_sent}, and is due in {for_people(-since)}: until then its message waits with "
            "the broker, or with a worker that has not answered, as far as is known."
        )
        remedy = f"{THEN} If it was purged: celery dislock free --reservation {lock.argument}"
        return case.answer("not due", sentence, facts, remedy, **more)
    if messages == 0:
        sentence = (
            f"{was_sent}, {nobody}, and nothing waits in its queue {' or '.join(queues)}: it was "
            "purged or lost, or is in another queue."
        )
        remedy = filled(UNMET.remedy, KEY=lock.argument)
        return case.answer("sent", sentence, facts, remedy, **more)
    if messages:
        facts.append(f"broker: {number(messages, 'message')} in {' and '.join(queues)}")
    remedy = "It starts when a worker takes it."
    idle = [queue for queue in queues if told.workers and not told.serving(queue)]
    if idle:
        facts.append(f"workers: none of them consumes {' or '.join(idle)}")
        remedy = f"Start a worker of its queue: celery worker --dislock -Q {as_argument(idle[0])}"
    sentence = f"{was_sent}, and {nobody}: it waits with the broker, as far as is known."
    return case.answer("sent", sentence, facts, remedy, **more)


def duplicate(case: Case) -> Answer | None:
    """The task was not sent, as a message of its key was there."""
    found = case.first(UNSENT)
    if found is None:
        return None
    first, key = task_id_of_reserved(decode(found.head)), key_of(found.lock)
    sentence = (
        f"{case.who()} was never sent: it was a duplicate of task {first}, whose message of key "
        f"{key!r} was there."
    )
    remedy = f"Its work is that of the other: celery dislock why {as_argument(first)}"
    about = {"duplicate_of": first}
    return case.answer("duplicate", sentence, (), remedy, key=key, about=about)


def claimed(case: Case) -> Answer | None:
    """The task was parked, has claimed its turn, and does not hold its lock any more."""
    found = case.first(RUNNING)
    if found is None:
        return None
    key = key_of(found.lock)
    _, _, since, settles, *_ = [*map(_whole, found.head.split(b" ", 4)[:4]), 0, 0, 0, 0]
    began = f", {for_people(time.time() - since / 1000)} ago" if since else ""
    if settles:
        sentence = f"{case.who()} has ended, and its result is on its way."
        return case.answer("ended", sentence, (), "", key=key)
    sentence = (
        f"{case.who()} has begun{began}, and does not hold lock {key!r} any more: its process has "
        "died, or its lease was lost, freed or capped."
    )
    remedy = (
        "If its process has died: with acks_late its message comes again, else it was lost with "
        "it; then send it again."
    )
    return case.answer("began", sentence, (), remedy, key=key)


def _whole(written: bytes) -> int:
    return int(written) if written.isdigit() and len(written) < len("9" * 19) else 0


def lost(case: Case) -> Answer | None:
    """Its result says that the task is parked, but this lock server does not know it."""
    if case.stored.state != PARKED:
        return None
    key = case.stored.key or "?"
    if case.has_gaps:
        sentence = f"{case.who()} was parked for lock {key!r}; whether it still is is not known."
        remedy = "Look again when the lock server answers, and at all locks."
        return case.answer("not known", sentence, (), remedy, key=key)
    sentence = (
        f"{case.who()} was parked for lock {key!r}, and this lock server knows nothing of that: it "
        "has lost its data, the workers use another one, or it did not answer when they parked it."
    )
    remedy = (
        "celery dislock doctor says where the workers lock. If they lock here, look into their "
        "logs: a task that was put off there waits in its queue, and comes by itself. If it was "
        "not, its message is lost: send it again."
    )
    return case.answer("not in line", sentence, (), remedy, key=key)


def started(case: Case) -> Answer | None:
    """Its result says that a worker has begun the task."""
    if not case.stored.state:
        return None
    sentence = (
        f"{case.who()} is {case.stored.state} as its result says, and neither the lock server nor "
        "a worker that answers knows of it."
    )
    return case.answer("not known", sentence, (), "Its worker may have died, or may not answer.")


def done(case: Case) -> Answer | None:
    """A mark says that its work is over."""
    found = next(
        (record for record in case.found if record.end == DONE and "@" not in record.name), None
    )
    if found is None:
        return None
    key = key_of(found.lock)
    sentence = (
        f"{case.who()} has left the line of lock {key!r} for good within the last two hours: it "
        "has run, or was dropped or replaced; its result is not stored."
    )
    return case.answer("ended", sentence, ("lock server: its done-mark",), SEND_AGAIN, key=key)


def unknown(case: Case) -> Answer:
    """Nothing is known of the task."""
    who = case.who().replace("Task", "task", 1)
    if case.away:
        sentence = f"Nothing is known of {who}, and the lock server is away."
        return case.answer("not known", sentence, (), "Look again when the lock server answers.")
    sentence = f"Nothing is known here of {who}."
    facts = [
        "lock server: no lock names it"
        if not case.keys
        else f"lock server: lock {' and '.join(map(repr, case.keys))} does not name it",
    ]
    remedy = (
        "It may wait in a queue, which no broker can be asked; it may have been purged; it may "
        "have ended, and its result has expired or was not kept; it may never have been sent, as a "
        "duplicate of another; or it is of another app or lock server: celery dislock doctor "
        "compares them."
    )
    return case.answer("not known", sentence, facts, remedy)


TRACES: Sequence[Callable[[Case], Answer | None]] = (
    ended,
    with_worker,
    retried,
    claimed,
    reserved,
    duplicate,  # after its reservation: it may have been sent since, under the same id
    done,
    lost,
    started,
)
