"""The checker finds what was planted, and nothing in a history that is sound."""

import pytest

from proof.checker import MARKED, SLACK, UNACKNOWLEDGED, check
from proof.durations import TOLD_WITHIN
from proof.events import MOMENTS
from proof.history import Event, History, read
from proof.nemesis import HARMLESS


def hold(name, begin, end, *, key="k", token=None, process=None, lost=None, **terms):
    """Make the events of a hold; it is trusted in the middle, too, and until its loss."""
    process = process or name
    more = {"key": key, "token": begin if token is None else token, **terms}
    events = [Event(begin, process, "hold", name, "begin", more)]
    events.append(Event((begin + (lost or end)) / 2, process, "hold", name, "trust", {}))
    if lost is not None:
        events.append(Event(lost, process, "hold", name, "lost", {}))
    return [*events, Event(end, process, "hold", name, "end", {})]


def calm_loss(since, lost, terms=None, **fault):
    """Make a hold that is lost at a time when its process ran and nothing was wrong."""
    ran = runs("a", since, lost)
    wrong = [Event(at, "nemesis", "fault", "cut", kind, {}) for kind, at in fault.items()]
    terms = {"lost": lost, "timeout": 1.0, **(terms or {})}
    return hold("a", since, lost + 1, **terms) + ran + wrong


def runs(process, since, until):
    """Make the events of a process that runs."""
    at = range(since * 10, int(until * 10))
    return [Event(n / 10, process, "process", process, "runs", {}) for n in at]


def answers(since, until):
    """Make the events of a lock server that answers."""
    return [
        Event(at / 10, "run", "server", "s", "answers", {}) for at in range(since * 10, until * 10)
    ]


def operation(name, begin, end=None, *, in_line=None, outcome="ok", **more):
    """Make the events of an operation; *more* are its terms."""
    events = [Event(begin, name, "operation", name, "invoke", {"key": "k", **more})]
    if in_line is not None:
        events.append(Event(in_line, name, "operation", name, "in line", {}))
    if end is not None:
        events.append(Event(end, name, "operation", name, outcome, {}))
    return events


def cancelled(at, **operation_made):
    """Make the events of an operation that is cancelled then: as it is taken, or as it ends."""
    made = operation("a", 1, **operation_made)
    return [*made, Event(at, "a", "operation", "a", "cancelled", {})]


def cancellation(kind, at=3, **more):
    """Make the event of a cancellation that a coroutine meets, or does not."""
    return [Event(at, "a", "cancellation", "c", kind, {"where": "acquire", **more})]


def freed(at, **more):
    """Make the events of an operation that is released then."""
    made = operation("a", 1, 2, lasts=2)
    return [*made, Event(at, "a", "operation", "a", "freed", more)]


def left(ending):
    """Make the event of a key that is left behind."""
    return [Event(9, "run", "key", f"dislock:{{k}}{ending}", "left", {})]


DOT = {"every": 2.0, "by_wall": True}
REFUSED = {"outcome": "refused"}


def task(name, *kinds, process="w", state="SUCCESS", **more):
    """Make the events of a task, one each second."""
    more = {"key": "k", "asked": 0.5, "parks": False, "may_fail": False, "state": state, **more}
    return [Event(at, process, "task", name, kind, more) for at, kind in enumerate(kinds, 1)]


def again(at, **more):
    """Make the events of a task that has ended, and begins again then."""
    return [*task("t", "sent", "begin", "end", **more), Event(at, "w", "task", "t", "begin", {})]


def retried(beside=4, a=99):
    """Make the events of a task that asks for a retry in two bodies, and ends twice; *a* dies."""
    about = {"key": "k", "asked": 0.5, "parks": True, "may_fail": False, "state": "SUCCESS"}
    told = [
        (1, "s", "sent"),
        (2, "a", "begin"),
        (3, "a", "over"),
        (beside, "b", "begin"),
        (beside + 0.1, "b", "over"),
        *((at, "c", kind) for at, kind in enumerate((*BODY, "over") * 2, 5)),
    ]
    seen = [one for one in told if one[1] != "a" or one[0] < a]
    events = [Event(at, process, "task", "t", kind, about) for at, process, kind in seen]
    return events + killed("a", a)


def granted(name, at, ahead=0):
    """Make the events of a hold; the clock that its token goes by is ahead, or behind."""
    return hold(name, at, at + 0.5, token=int((at + ahead) * 1e6))


def refused_to_start(since, at):
    """Make the event of a worker that does not start."""
    return [Event(at, "run", "process", "7", "refused", {"since": since})]


def unstarted(since, at, *killed_at, of="7"):
    """Make the events of a worker that Celery ends at its start, and of kills of children."""
    kills = [Event(one, "run", "process", "8", "killed", {"of": of}) for one in killed_at]
    return [*kills, Event(at, "run", "process", "7", "unstarted", {"since": since})]


def replaced(asked, newer, older):
    """Make the events of a task that begins at *older*, and of one that was asked for later."""
    more = {"key": "k", "parks": True, "may_fail": False, "replaces": True, "asked": 0.5}
    return [
        Event(1, "s", "task", "old", "sent", more),
        Event(asked + 0.1, "s", "task", "new", "sent", {**more, "asked": asked}),
        *(Event(older + n, "w", "task", "old", kind, {}) for n, kind in enumerate(BODY)),
        *(Event(newer + n, "w", "task", "new", kind, {}) for n, kind in enumerate(BODY)),
    ]


def cancelling(*sends, ahead=(0, 0)):
    """Make the events of two tasks that cancel each other, each from when to when it was sent."""
    return [
        Event(sent, "s", "task", name, "sent", {**CANCELS, "asked": asked, "ahead": by})
        for (asked, sent), name, by in zip(sends, ("old", "new"), ahead, strict=True)
    ]


def bodies(**begins):
    """Make the bodies of tasks, which ask for their locks a moment before they begin."""
    return [
        Event(at + n, "w", "task", name, kind, {"since": at - 0.1})
        for name, at in begins.items()
        for n, kind in enumerate(BODY)
    ]


def revoked(name, by):
    """Make the end of a task for which another one came."""
    more = {"state": "REVOKED", "reason": f"a newer message of key 'k' replaces it: task {by}"}
    return [Event(6, "w", "task", name, "over", {}), Event(9, "r", "task", name, "outcome", more)]


def tick(name, at, entry="often", **more):
    """Make the event of a message that a beat sends; its clock says the time of the history."""
    terms = {"entry": entry, "by": "b", "tick": at, "every": 1.0, "by_wall": False, "timeout": 1.0}
    return [Event(at, "run", "tick", name, "sent", {**terms, **more})]


def rounds(*beats, until=9):
    """Make the events of beats that go round, each half a second."""
    return [Event(n / 2, who, "beat", who, "goes round", {}) for who in beats for n in range(until)]


def fault(begin, end, about="f", **more):
    """Make the events of a fault."""
    kinds = (("begin", begin), ("end", end))
    return [Event(at, "nemesis", "fault", about, kind, more) for kind, at in kinds]


def killed(process, at):
    """Make the event of a kill."""
    return [Event(at, "nemesis", "process", process, "killed", {})]


def element(name, guard="fenced"):
    """Make the event of an element that was acknowledged."""
    return [Event(1, "w", "element", name, "ok", {"file": "f", "guard": guard})]


def file(*names):
    """Make the event of what the file has at the end."""
    return [Event(9, "run", "file", "f", "end", {"elements": list(names)})]


def dies(at, **terms):
    """Make the events of a hold from 1 on, whose process kills itself then."""
    begin, trust, _ = hold("a", 1, at, timeout=8.0, **terms)
    return [begin, trust, Event(at, "a", "process", "a", "killed", {"by": "itself"})]


def asks(name, begin, outcome="refused"):
    """Make the events of a question whether a lock can be had."""
    more = {"key": "k", "lasts": 8.0}
    events = [Event(begin, "s", "probe", name, "invoke", more)]
    events.append(Event(begin + 0.1, "s", "probe", name, outcome, {}))
    return [*events, Event(begin + 0.1, "s", "probe", name, "freed", {})] * (outcome == "ok") or (
        events
    )


def several(name, begin, end):
    """Make the events of an operation that is refused one of two locks, which another has."""
    has_one = operation("c", 0.1, 0.5, key="j")
    return has_one + operation(name, begin, end, keys=["k", "j"], lasts=1.0, **REFUSED)


def overtaken(since, confirmed=2.5, **lasts):
    """Make an older task that begins alone, and had asked for that at *since*, and a newer one."""
    events = [one for one in replaced(2, 99, 5) if one.at < 99]
    events[1] = events[1]._replace(at=confirmed)
    events[2] = events[2]._replace(more={"since": since})
    events.append(Event(98, "w", "task", "new", "outcome", {"state": "SUCCESS"}))
    return events + (fault(lasts["begin"], lasts["end"]) if lasts else [])


def starts(*at, asked=0.0):
    """Make holds under a rate of two in two seconds; each was asked for some time before."""
    of_each = [hold(f"s{n}", n, n + 0.1, since=n - asked, limit=9, rate=[2, 2.0]) for n in at]
    return [event for events in of_each for event in events]


BODY = ("begin", "end")
CANCELS = {"key": "k", "parks": True, "may_fail": False, "cancels": True}
IN_TURN = cancelling((1, 1.1), (2, 2.1))
TOO_LATE = bodies(new=3, old=5)
LEAST, CAPPED = {"at_least": 2.0, "timeout": 4.0}, {"cap": 3, "timeout": 1.0}
REVOKED = {"state": "REVOKED", "parks": True}
FORGETS, REDELIVERS = {"loses_data": True}, {"redelivers": True}
MISSES = {"misses_releases": True}
JUMPS = {"ends_leases": True, "sets_clock": 2}
AN_HOUR = {"ends_leases": True, "sets_clock": 3600}
PAUSE = [Event(2, "operator", "limit", "k", "set", {"limit": 0, "until": 5})]
SHARED, PAIR = {"mode": "shared"}, {"limit": 2}
FAIR = {"fair": True, "timeout": 5}
OVERTAKEN = operation("a", 1, 6, in_line=2, **FAIR) + operation("b", 3, 5, **FAIR)
DUPLICATE = task("t", "sent", "begin", "end") + task("u", "duplicate", of="t", asked=2.5)
MET_LATE = cancellation("met", at=4 + MOMENTS, asked=3) + runs("a", 3, 4 + MOMENTS)
UNSENT = task("t", "sent", "begin", "retries", "over", "outcome", state="FAILURE")
TOO_SOON = hold("a", 1, 2, **LEAST) + hold("b", 2.5, 4)


@pytest.mark.parametrize(
    ("promise", "events"),
    [
        ("exclusion", hold("a", 1, 4) + hold("b", 3, 5)),
        ("exclusion", hold("a", 1, 5, **SHARED) + hold("b", 3, 6)),
        ("exclusion", hold("a", 1, 5) + hold("b", 3, 6, **SHARED)),
        ("exclusion", hold("a", 1, 9, **PAIR) + hold("b", 2, 9, **PAIR) + hold("c", 3, 9, **PAIR)),
        ("exclusion", hold("a", 1, 4, timeout=1) + hold("b", 3, 6) + fault(5, 6, **FORGETS)),
        ("exclusion", hold("a", 1, 3.8, timeout=1) + hold("b", 3.5, 6) + fault(2, 3, **JUMPS)),
        ("exclusion", hold("a", 3, 4, asked=2.5) + PAUSE),
        ("token", hold("a", 1, 2, token=8) + hold("b", 3, 4, token=8)),
        ("kept", calm_loss(1, 5)),
        ("kept", calm_loss(1, 5) + answers(1, 5)),
        ("kept", calm_loss(1, 5, begin=2, end=3)),
        ("order", OVERTAKEN),
        ("newest", replaced(3, 4, 5)),
        ("tick", tick("t", 1) + tick("u", 1.9)),
        ("tick", tick("t", 1, **DOT) + tick("u", 3.9, **DOT) + tick("v", 2, **DOT)),
        ("tick", tick("t", 1) + tick("u", 1.9) + fault(2, 3, **FORGETS)),
        ("again", tick("t", 1) + tick("t", 2)),
        ("again", tick("t", 1) + tick("t", 2) + killed("b", 1.5) + killed("c", 1.1)),
        ("missed", tick("t", 1, "rare") + tick("u", 2.5) + tick("v", 4, "rare")),
        ("silent", tick("t", 1) + rounds("b", "c")),
        ("silent", tick("t", 1) + tick("u", 4) + rounds("b", "c") + fault(2, 3, **HARMLESS)),
        ("end", operation("a", 1, **FAIR) + hold("b", 7 + SLACK, 8 + SLACK)),
        ("free", operation("a", 1, 2, outcome="refused")),
        ("free", operation("a", 1, 2, outcome="refused") + operation("b", 3, 4)),
        ("free", cancelled(2) + operation("b", 3 + MOMENTS, 4 + MOMENTS, **REFUSED)),
        ("free", freed(3) + operation("b", 4, 4.5, **REFUSED)),
        ("free", freed(3, answered=False) + operation("b", 5.5, 6, **REFUSED)),
        ("free", freed(3) + operation("b", 6.5, 7, **REFUSED) + fault(2.5, 4, **MISSES)),
        ("cancelled", cancellation("hidden")),
        ("cancelled", MET_LATE),
        ("end", refused_to_start(8, 9) + fault(7, 7.9)),
        ("end", unstarted(8, 9, 7.9, 9.1)),
        ("end", unstarted(8, 9, 8.5, of="6")),
        ("free", DUPLICATE),
        ("nothing lost", task("t", "sent", "begin", "end", "outcome", state="FAILURE")),
        ("nothing lost", task("t", "sent", "outcome", **REVOKED)),
        ("nothing lost", task("t", "sent") + fault(2, 3, **FORGETS)),
        ("nothing lost", task("t", "sent", parks=True) + fault(0.1, 0.2, **FORGETS)),
        ("nothing lost", UNSENT + fault(6.5, 7, **REDELIVERS)),
        ("once", task("t", "sent", "begin", "end", "begin", "end")),
        ("once", again(9.5) + killed("w", 3.5 + UNACKNOWLEDGED)),
        ("once", retried()),
        ("once", task("t", "sent", "begin", "end", "begin") + fault(9, 9.5, **REDELIVERS)),
        ("once", task("t", "sent", "begin", "end", "begin") + fault(3.2, 3.4, **FORGETS)),
        ("once", task("t", "sent", "begin", "end", "begin", parks=True) + fault(1, 2, **FORGETS)),
        ("once", again(3.5 + MARKED, parks=True) + fault(2.8, 3.2)),
        ("exclusion", hold("a", 3, 4, asked=2.5) + PAUSE + fault(9, 9.5, **JUMPS)),
        ("at least", TOO_SOON),
        ("at least", hold("a", 1, 2, **LEAST) + hold("b", 2.5, 4, **SHARED)),
        ("at least", TOO_SOON + fault(3, 4, **FORGETS)),
        ("rate", starts(1, 2, 2.9)),
        ("rate", starts(1, 2, 3.5, 3.9)),
        ("rate", starts(1, 2, 2.9) + fault(0, 0.9, **FORGETS)),
        ("cap", hold("a", 1, 9, **CAPPED)),
        ("kept", calm_loss(2, 2.5, {"since": 1.9, "cap": 9})),
        ("crash", dies(2) + asks("p", 2.1 + TOLD_WITHIN)),
        ("crash", dies(2) + asks("p", 0.5, "ok") + asks("q", 2.1 + TOLD_WITHIN)),
        ("crash", hold("b", 0.5, 0.9) + dies(2) + asks("p", 6) + fault(0.5, 0.9)),
        ("crash", dies(2) + asks("p", 6) + fault(1.9, 5.5, kills=True) + killed("z", 0.5)),
        ("crash", dies(2) + asks("p", 6) + killed("s", 4)),
        ("all or none", several("a", 1, 2) + operation("b", 2.5, 2.6, **REFUSED)),
        ("free", operation("a", 1, 2, keys=["k", "j"], **REFUSED)),
        ("newest", overtaken(3, begin=3.1, end=3.2)),
        ("takes over", IN_TURN + TOO_LATE),
        ("takes over", IN_TURN + TOO_LATE + fault(0.2, 0.4, **FORGETS) + fault(7, 8, **JUMPS)),
        ("takes over", IN_TURN + bodies(old=3) + revoked("new", by="old")),
        ("written", element("e") + element("f") + file("f")),
        ("clean", left("")),
        ("clean", left(":line") + fault(1, 2, **FORGETS)),
        ("clean", left(":aside") + fault(1, 2)),
    ],
)
def test_a_planted_violation_is_found(promise, events):
    """Each promise has a history that breaks it, and that history breaks no other."""
    found = check(sorted(events, key=lambda event: event.at)).violations
    assert [violation.promise for violation in found] == [promise], found


@pytest.mark.parametrize(
    "events",
    [
        hold("a", 1, 5, **SHARED) + hold("b", 3, 6, **SHARED),
        hold("a", 1, 9, lost=5) + hold("b", 6, 7),
        hold("a", 1, 3.6, timeout=1) + hold("b", 3.5, 6) + fault(2, 3, **FORGETS),
        hold("a", 1, 4, timeout=1)
        + hold("b", 3.5, 6)
        + fault(2, 3, **FORGETS)
        + fault(3.1, 3.2, about="g"),
        hold("b", 3.1, 6, asked=3.05)
        + hold("a", 3.2, 3.3, timeout=1, token=1, asked=1)
        + fault(2, 3, **FORGETS),
        hold("a", 3, 4, asked=1.5) + PAUSE,
        granted("a", 1) + granted("b", 4, -3.5) + fault(2, 3, **JUMPS),
        granted("a", 1)
        + granted("b", 2, 3600)
        + granted("c", 9, 3593.1)  # one more than the token before it
        + granted("d", 10)
        + granted("e", 11)
        + fault(1.9, 3, **AN_HOUR),
        hold("a", 3, 4, asked=2.5) + PAUSE + fault(1, 1.9, **FORGETS),
        freed(3, answered=False) + operation("b", 9, 9.5, **REFUSED) + fault(1, 2, **JUMPS),
        calm_loss(1, 5, begin=2, end=4),
        calm_loss(1, 5) + answers(1, 4),
        calm_loss(2, 2.5, {"since": 1.4}),
        operation("a", 1, 4, in_line=2, **FAIR) + operation("b", 3, 5, **FAIR),
        operation("a", 1, 6, in_line=4, **FAIR) + operation("b", 3, 5, **FAIR),
        OVERTAKEN + fault(3, 4),
        operation("a", 1, 4, in_line=2, outcome="refused", **FAIR) + operation("b", 3, 5, **FAIR),
        operation("a", 1, **FAIR) + hold("b", 7 + SLACK, 8 + SLACK) + killed("a", 2),
        freed(3, answered=False) + operation("b", 4, 4.5, **REFUSED),
        freed(3) + operation("b", 5, 6, **REFUSED) + fault(2.5, 4, **FORGETS),
        cancelled(2) + operation("b", 9, 9.5, **REFUSED) + fault(1.5, 1.6),
        cancellation("met", at=4 + MOMENTS, asked=3) + runs("a", 5, 4 + MOMENTS),
        unstarted(8, 9, 8.5),
        tick("t", 1) + tick("t", 2) + answers(0, 1) + answers(2, 3),
        [*operation("a", 1, 2, outcome="refused"), PAUSE[0]._replace(at=0)],
        task("t", "sent", "begin", "end") + task("u", "duplicate", of="t", asked=1.5),
        DUPLICATE + fault(1.5, 2.1, **FORGETS),
        task("t", "sent", parks=True) + fault(2, 3, **FORGETS),
        task("t", "sent", "begin", "end", "begin", "end") + fault(2, 3, **REDELIVERS),
        task("t", "sent", "begin", "end", "begin", parks=True) + fault(2.8, 3.2),
        left(":aside") + fault(1, 2, **FORGETS),
        task("t", "sent", "outcome", **REVOKED) + fault(1, 2, **FORGETS),
        # In its body: the claim goes, and so there is no mark at its end.
        task("t", "sent", "begin", "end", "begin", parks=True) + fault(2.1, 2.2, **FORGETS),
        task("t", "sent", "outcome", state="FAILURE", may_fail=True),
        UNSENT + fault(2.8, 3.5, **REDELIVERS),
        # It has asked for a retry, and its process dies before Celery says so.
        task("t", "sent", "begin", "retries", "begin", "end", "begin") + killed("w", 3.1),
        retried(beside=2.5),
        # The claim of its first body goes, and a copy of that comes when the retry has ended.
        tick("t", 1) + tick("u", 1.9) + fault(1.5, 1.6, **FORGETS),
        tick("t", 1) + tick("t", 2) + killed("b", 1.1),
        tick("t", 1) + tick("t", 9) + fault(5, 6, **FORGETS),
        tick("t", 1, "rare") + tick("u", 2.5) + tick("v", 4, "rare") + fault(3, 3.5),
        tick("t", 1) + rounds("b"),
        tick("t", 1) + tick("u", 4) + rounds("b", "c") + fault(2, 2.5),
        replaced(3, 4, 5) + fault(4.2, 4.5, **FORGETS),
        hold("a", 1, 2, **LEAST) + hold("b", 3, 4),
        hold("a", 1, 2, **SHARED, **LEAST) + hold("b", 2.5, 4, **SHARED),
        TOO_SOON + fault(1.9, 2.2, **FORGETS),
        starts(1, 2, 2.9) + fault(1.2, 1.4, **FORGETS),
        hold("a", 1, 6, **CAPPED),
        hold("a", 1, 3.8, **CAPPED) + hold("b", 3.5, 6) + fault(2, 3, **FORGETS),
        calm_loss(1, 5, {"cap": 9}),
        dies(2) + asks("p", 1.9 + TOLD_WITHIN),
        dies(2) + asks("p", 6, "ok"),
        dies(2) + asks("p", 6) + killed("z", 4),
        dies(2) + asks("p", 6) + hold("b", 5, 5.5),
        dies(2) + asks("p", 2.5, "ok") + asks("q", 6),
        several("a", 1, 2) + operation("b", 2.5, 2.6, **REFUSED) + fault(1.5, 1.6),
        overtaken(3, begin=2.1, end=2.2),
        IN_TURN + bodies(new=3) + revoked("old", by="new"),
        IN_TURN + bodies(old=3, new=7) + revoked("new", by="unknown"),
        cancelling((1, 1.1), (2, 2.1), ahead=(0, 2)) + TOO_LATE,
        IN_TURN + TOO_LATE + fault(4, 4.5, **FORGETS),
        IN_TURN + TOO_LATE + [Event(2.5, "r", "clock", "worker", "wrong", {})],
        element("e") + file("e"),
        element("e", "unguarded") + file(),
    ],
)
def test_a_sound_history_has_no_violation(events):
    """What is allowed is not called broken."""
    assert check(sorted(events, key=lambda event: event.at)).violations == []


def test_an_overlap_after_a_declared_loss_is_counted():
    """A body that goes on after it was told of its loss overlaps, and the lock is not broken."""
    verdict = check(sorted(hold("a", 1, 9, lost=5) + hold("b", 6, 7), key=lambda event: event.at))
    assert (verdict.counts["overlaps declared"], verdict.counts["losses declared"]) == (1, 1)


def test_a_history_is_read_as_it_was_written(tmp_path):
    """Events come back in the order of their instants, whoever wrote them first."""
    path = tmp_path / "history"
    history = History(path, "p")
    history.add("hold", "a", "end", at=2.0)
    history.add("hold", "a", "begin", at=1.0, key="k")
    history.close()
    assert read(path) == [
        Event(1.0, "p", "hold", "a", "begin", {"key": "k"}),
        Event(2.0, "p", "hold", "a", "end", {}),
    ]
