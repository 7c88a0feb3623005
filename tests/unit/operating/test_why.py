"""``why``: the sentence of each state in which a task can be, what it rests on, and what to do."""

import re
import shlex
import time

import pytest
from celery.exceptions import NotRegistered, TaskRevokedError

from celery_dislock import SingletonTask
from celery_dislock.config.options import TaskOptions
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import LockHeldError, StoreError
from celery_dislock.messages.message import Message
from celery_dislock.operating.checks.troubles import troubles_of
from celery_dislock.operating.site import Site, UniqueTask
from celery_dislock.operating.why import asked
from celery_dislock.operating.why.sentences import at, nth
from celery_dislock.servers import find
from celery_dislock.servers.overrides import RateState
from tests.commands import AWAY, FOUND
from tests.declaring import declare
from tests.staged import RESERVED, holder, lock, place
from tests.unit.operating.examining import told_in

HELD = "which shop.export[id-1] on celery@w1 (pid 7) has held for 61 s"
TOLD = told_in("why.txt")
TIME = re.compile(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d [^,]+, in [\d dhmins]+")
OVERDUE = {"renewed": 25.0, "remaining": 5.0}
ID = "id-9"


@pytest.fixture
def workers(app, monkeypatch):
    """What the workers tell of the task, by their names; an error: what the broker says."""
    answers = {}

    def broadcast(_command, *, arguments, callback, **_how):
        assert set(arguments) == {"task_id"}
        for name, one in answers.items():
            if isinstance(one, Exception):
                raise one
            callback({name: one})

    monkeypatch.setattr(app.control, "broadcast", broadcast)
    return answers


@pytest.fixture
def why(dislock, server, workers, monkeypatch):
    """Ask for a task; return the answer, and check that its text fits into 80 columns."""
    monkeypatch.setattr(time, "time", server.clock)
    monkeypatch.setattr(Site, "is_swept", lambda *_: True)

    def ask(task_id=ID, *args, code=0):
        answer = dislock("why", task_id, *args)
        assert answer.exit_code == code, answer.output
        assert max(map(len, answer.stdout.splitlines())) <= 80
        return dislock.json("why", task_id, *args)

    ask.once = lambda task_id: dislock.json("why", task_id)
    return ask


@pytest.fixture
def store(app):
    """Store the state of a task's result."""

    def store(state, result=None, task_id=ID):
        app.backend.store_result(task_id, result, state)

    return store


def known(**told):
    """What a worker tells that knows the question."""
    return {"queues": ["celery"], "locks": True, "revoked": False, "is": None, **told}


def assert_told(answer, case):
    """Check the state, the sentence and the remedy of a case; any time is a time."""
    sentence = TIME.sub("TIME", answer["sentence"])
    remedy = f"-> {answer['remedy']}".rstrip()
    assert [answer["state"], sentence, remedy] == TOLD[case]


def says(answer, state, *words):
    """Check the state, and words of the sentence."""
    assert answer["state"] == state, answer
    for one in words:
        assert one in answer["sentence"], answer["sentence"]


# It holds its lock.


RUNNING = {  # the holder, how many wait, and a fact that the answer rests on
    "renewed": ({}, 2, "2 wait for the"),
    "a fixed expiry": ({"renewed": None}, 0, ""),
    "a newer task waits": ({"superseded": "id-2"}, 1, "task id-2 waits for it to end"),
    "it may hang": ({"held": 9000.0}, 1, "Held unusually long"),
    "overdue": (OVERDUE, 0, ""),
}


@pytest.mark.parametrize("case", RUNNING)
def test_it_runs(why, server, case):
    """Where, for how long, when it was renewed, how many wait, and how to end it."""
    held, waiting, rests_on = RUNNING[case]
    server.put(lock("k", holders=[holder(**held)], waiting=waiting))
    answer = why("id-1")
    assert_told(answer, f"it runs: {case}")
    assert rests_on in " ".join(answer["rests_on"])
    assert answer["about"]["worker"] == "celery@w1"
    assert answer["about"].get("superseded") == held.get("superseded")


def test_a_lease_that_is_left_to_expire_is_no_run(why, server, store):
    """The task has ended, as its result says."""
    server.put(lock("k", holders=[holder(expiring=True, renewed=None)]))
    store("FAILURE", ValueError("no"), "id-1")
    says(why("id-1"), "ended", "has failed", ": no.")


# It waits.


TURN = {"turn": True}
EARLY = RateState(Rate(5, 60.0), 30.0)
IN_THE_WAY = {
    "held": {"holders": [holder()]},
    "held by two": {"holders": [holder(), holder(2)]},
    "overdue": {"holders": [holder(**OVERDUE)]},
    "a turn": {"holders": [holder(**TURN)]},
    "kept": {"holders": [holder(**TURN, waits="a")]},
    "kept by two": {"holders": [holder(**TURN, waits="a"), holder(2, **TURN, waits="b")]},
    "held and kept": {"holders": [holder(), holder(2, **TURN, waits="b")]},
    "nobody": {},
    "a pause": {"limit": 0, "limit_age": 7200.0, "limit_note": "by ann: deploy"},
    "a pause without a note": {"limit": 0, "limit_age": 60.0},
    "held back": {"rate": RateState(None, 90.0, held_back=90.0, back_note="429", age=1.0)},
    "a rate": {"rate": EARLY},
    "a rate of people": {"rate": EARLY._replace(is_set=True, note="by ann: 429", age=9.0)},
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_what_is_in_the_way_of_its_lock(why, server, case):
    """Who holds it, who has paused it and why, or the time."""
    server.put(lock("k", waiting=2, line=[place(1), place(2)], **IN_THE_WAY[case]))
    answer = why("parked-2")
    assert_told(answer, f"in the way: {case}")
    assert answer["about"]["place"] == 2
    assert "lock server: shop.pay[parked-1] is the first, for 5.0 s" in answer["rests_on"]


@pytest.mark.parametrize(
    ("lasted", "limit", "starts", "told"),
    [
        ("1 100000", "", 139.0, "it may start in about 2 min, by how long the last bodies took"),
        ("1 9000", f"2 back - 1 {9 * 10**13} 429", ..., "in about "),
        ("", "", None, ""),
    ],
    ids=["an estimate", "held back", "not known"],
)
def test_when_it_starts(why, server, lasted, limit, starts, told):
    """By the bodies before it, if any is known to have lasted."""
    server.put(lock("k", holders=[holder()], waiting=2, line=[place(1), place(2)]))
    if lasted:
        server.send("SET", "dislock:{k}:lasted", lasted)
    if limit:
        server.send("SET", "dislock:{k}:limit", limit)
    answer = why("parked-2")
    facts = [one for one in answer["rests_on"] if "may start" in one]
    assert [told in one for one in facts] == ([True] if told else [])
    if starts is not ...:
        assert answer["about"]["starts_in"] == (starts and pytest.approx(starts, abs=0.1))
    assert answer["about"]["is_estimate"] == bool(told)


@pytest.mark.parametrize("nth", [1, 2])
def test_what_those_before_it_cost(why, server, nth):
    """Units are free, and the first in line needs more: it waits for them, and nobody passes it."""
    line = [place(1, cost=3, limit=5), place(2, limit=5)]
    server.put(lock("k", holders=[holder(cost=3)], waiting=2, line=line))
    answer = why(f"parked-{nth}")
    told = "lock server: the first in line needs 3 of 5 units, and 2 are free: nobody passes it"
    assert told in answer["rests_on"]
    assert answer["about"]["cost"] == line[nth - 1].cost
    running = why("id-1")
    assert "lock server: its lease costs 3" in running["rests_on"]
    assert running["about"]["cost"] == 3


def test_when_it_starts_by_a_rate_with_costs(why, server):
    """Those before it are taken to cost as much; of the first the time is known."""
    line = [place(nth, cost=3, limit=None) for nth in (1, 2)]
    server.put(lock("k", waiting=2, line=line, rate=RateState(Rate(5, 60.0), 30.0)))
    told = [
        next(fact for fact in why(f"parked-{nth}")["rests_on"] if "may start" in fact)
        for nth in (1, 2)
    ]
    assert told == [
        "lock server: it may start in 30 s",
        "lock server: it may start in about 90 s, if those before it cost as much",
    ]


def test_what_keeps_its_lock_is_followed_to_its_cause(why, server):
    """An operator's pause two locks on, with its note and what takes it back."""
    paused = {"limit": 0, "limit_age": 7200.0, "limit_note": "by ann: deploy"}
    server.put(
        lock("a", holders=[holder(turn=True, waits="b")], waiting=1, line=[place(3)]),
        lock("b", holders=[holder(2, turn=True, waits="c")], waiting=1, line=[place(1)]),
        lock("c", waiting=1, line=[place(2)], **paused),
    )
    answer = why("parked-3")
    assert answer["sentence"] == (
        "shop.pay[parked-3] is alone in line for lock 'a', which is kept for 61 s so far for task "
        "id-1, which waits for lock 'b', which is kept for 62 s so far for task id-2, which waits "
        "for lock 'c', which is paused (by ann: deploy), for 2 h 00 min so far."
    )
    assert (answer["state"], answer["key"], answer["about"]["because_of"]) == ("paused", "a", "c")
    assert answer["remedy"] == "To take it back: celery dislock resume c"
    server.damage("c")
    says(why("parked-3"), "in line", "for task id-2, which waits for lock 'c'.")


def test_nobody_sweeps_its_line(why, server, monkeypatch):
    """Its lock is free, and no worker gives it its turn."""
    monkeypatch.setattr(Site, "is_swept", lambda *_: False)
    server.put(lock("k", waiting=1, line=[place()]))
    assert why("parked-1")["remedy"].startswith("Start a worker with --dislock")


def test_who_has_not_claimed_its_turns_is_dropped_and_nobody_behind_it(why, server):
    """The remedy names the task that is in the way, and not the one that was asked for."""
    first = place(1, turns=3, routing_key="mail")
    server.put(lock("k", waiting=2, line=[first, place(2)]))
    answer = why("parked-2")
    assert answer["about"]["troubles"] == ["unclaimed"]
    assert answer["remedy"].endswith("To end one: celery dislock drop parked-1:0:0")
    assert any(one.endswith(": ticket parked-1:0:0, queue mail") for one in answer["rests_on"])


def test_it_keeps_what_it_has_passed(why, server):
    """It is found at its second lock, whose record is beside the first."""
    kept = {"owner": "parked-1:0:0#", "turn": True, "waits": "api", "id": "parked-1"}
    server.put(
        lock("a", holders=[holder(**kept)]),
        lock(
            "api",
            holders=[holder()],
            waiting=1,
            line=[place(stations=["a", "api"], beside="dislock:{a}")],
        ),
    )
    for args in ((), ("--key", "a")):
        answer = why("parked-1", *args)
        says(answer, "in line", "alone in line for lock 'api' (the 2nd of its 2 locks), ", HELD)
        assert answer["sentence"].endswith("; it keeps 'a' meanwhile.")


@pytest.mark.parametrize(
    ("owner", "own", "where"),
    [
        (f"{ID}@celery@w2:8/cd.1", [], "slot"),
        (f"{ID}:~cd.2@w2:8:9/", [], "body"),
        (f"{ID}:~cd.2@w2:8:9/", [{"owner": f"{ID}@celery@w2:8/cd.1", "id": ID}], "body"),
    ],
    ids=["in its slot", "in its body, without a lock", "in its body, with a lock of its own"],
)
def test_it_waits_in_its_slot_or_its_body(why, server, owner, own, where):
    """Where, and behind whom; it is not told that it takes no lock."""
    locks = [lock("own", holders=[holder(task="shop.wait", **one)]) for one in own]
    server.put(lock("k", holders=[holder()]), *locks)
    about = f'{{"task":"shop.wait","id":"{ID}","worker":"celery@w2","pid":8}}'
    server.send("HSET", "dislock:{k}:places", owner, f"1 {9 * 10**13} 30000 x:1 {about}")
    server.send("ZADD", "dislock:{k}:line", server.now_us, owner)
    waits = f"waits in its {where} on celery@w2 (pid 8), alone in line for lock 'k'"
    for args in ((), ("--key", "k")):
        says(why(ID, *args), "waiting in its slot", f"shop.wait[{ID}] {waits}, {HELD}.")


def test_a_task_that_has_lost_its_place_gets_it_again(why, server):
    """Its record is there, and it stands in no line."""
    server.put(lock("k", waiting=1, line=[place()]))
    server.send("DEL", "dislock:{k}:line")
    says(why("parked-1"), "in line", "has lost its place: the next sweep")


def turn(server, **changes):
    kept = {"owner": "parked-1:0:0#", "turn": True, "id": "parked-1", "task": None}
    server.put(lock("k", holders=[holder(**kept)], turns=[place(turns=3, **changes)]))


def test_it_has_its_turn(why, server, workers, monkeypatch):
    """Since when, in which queue, and who could take it."""
    monkeypatch.setattr(Site, "messages_in", lambda *_: 1)
    turn(server, routing_key="mail")
    told = "shop.pay[parked-1] has its turn for lock 'k', for 61 s (the 3rd)"
    answer = why("parked-1")
    says(answer, "has its turn", f"{told}: its message is in queue 'mail', and no worker answers.")
    assert "broker: 1 message in queue 'mail'" in answer["rests_on"]
    workers["w1"] = known()
    answer = why("parked-1")
    says(answer, "has its turn", f"{told}, and no worker that answers consumes its queue 'mail'.")
    assert answer["remedy"] == "Start a worker of that queue: celery worker --dislock -Q mail"
    workers["w1"] = known(queues=["mail"])
    says(why("parked-1"), "has its turn", "and no worker has taken it yet.")
    for has, words in (
        ("scheduled", "waits there until "),
        ("reserved", "waits there for a free slot"),
        ("active", "is about to start there"),
    ):
        workers["w1"] = known(**{"is": has})
        says(why("parked-1"), "has its turn", f"{told}: its message is with w1, and {words}")


# It has lost its place.


A_MESSAGE = Message("", "mail", {}, None, None, {}, alone=True, body=b"").to_bytes().decode()
BEGAN = "1 BEGAN000 BEGAN {} x:1"  # and for how many seconds its result may be on its way


def test_it_was_set_aside_and_some_workers_lack_its_task(
    why, server, store, workers, app, monkeypatch
):
    """They are named: put back, it would come to one of them, and be set aside again."""
    asked_of = []

    def registered(_command, arguments=None, destination=None, **_how):
        asked_of.append(destination)
        return [{"w1": ["shop.mail [rate_limit=1/s]"]}, {"w2": ["shop.other"]}, {"w4": []}]

    message = Message("", "mail", {"task": "shop.mail"}, None, None, {}, alone=True, body=b"")
    server.send("HSET", "dislock:{k}:aside", f"{ID}:0:0", b"1 damaged " + message.to_bytes())
    workers |= {"w1": known(queues=["mail"]), "w2": known(queues=["mail"])}
    workers |= {"w3": known(queues=["mail"]), "w4": known(queues=["other"])}
    broadcast = app.control.broadcast

    def either(command, **how):
        return (registered if command == "registered" else broadcast)(command, **how)

    monkeypatch.setattr(app.control, "broadcast", either)
    answer = why()
    assert asked_of[0] == ["w1", "w2", "w3"]
    put_back = f"celery dislock put-back --ticket {ID}:0:0 k"
    told = f"When these workers of its queue have its task, too: w2: {put_back}"
    assert answer["remedy"] == told
    monkeypatch.setattr(app.control, "inspect", lambda *_, **__: 1 / 0)
    assert why()["remedy"] == f"When a worker can run it: {put_back}"
    store("FAILURE", KeyError("shop.gone"))
    says(why(), "set aside", ": 'shop.gone'.")


KEPT = {
    "aside": ("aside", f"1 damaged {A_MESSAGE}"),
    "lost": ("aside", "?"),
    "no message": ("aside", '1 {"headers": 7}\n'),
    "replaced": ("replaced", "?"),
    "its process has died": ("running", BEGAN.format(0)),
    "settles": ("running", BEGAN.format(9)),
    "no time": ("running", "1 x"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_its_lock_keeps_of_it(why, server, case):
    """Of what has lost its place: why, if a result says so, and how to put it back."""
    part, record = KEPT[case]
    record = record.replace("BEGAN", f"{server.now_ms - 60_000}")
    server.send("HSET", f"dislock:{{k}}:{part}", f"{ID}:0:0", record)
    assert_told(why(), f"its lock keeps: {case}")


def test_its_done_mark_tells_that_it_is_over(why, server):
    """Without a result nothing tells how; a mark of a delivery tells nothing."""
    server.send("SET", f"dislock:{{k}}:done:{ID}@w1:7/a.1", "1")
    says(why(code=FOUND), "not known")
    server.send("SET", f"dislock:{{k}}:done:{ID}:1:0", "1")
    for args in ((), ("--key", "k")):
        says(why(ID, *args), "ended", "has left the line of lock 'k' for good")


# A worker has it.


WITH_A_WORKER = {
    "reserved": {"is": "reserved"},
    "revoked": {"is": "reserved", "revoked": True},
    "scheduled": {"is": "scheduled"},
    "scheduled for some time": {"is": "scheduled", "eta": None},
    "put off": {"is": "scheduled", "put_off": 1},
    "put off again": {"is": "scheduled", "put_off": 3},
    "active": {"is": "active"},
    "locks off": {"is": "active", "locks": False},
    "no lock": {"is": "active", "keys": []},
    "an odd answer": {"is": "active", "keys": 7, "pid": "?", "since": "x"},
}


@pytest.mark.parametrize("case", WITH_A_WORKER)
def test_a_worker_has_it(why, server, workers, case):
    """It runs there without its lock, or waits for a slot or for its time."""
    server.put(lock("k", holders=[holder()]))
    now = server.clock()
    usual = {"task": "shop.pay", "keys": ["k"], "pid": 7, "since": now - 60, "eta": now + 60}
    workers["w1"] = known(**{**usual, **WITH_A_WORKER[case]})
    assert_told(why(), f"a worker has it: {case}")


def test_a_worker_names_its_locks(why, server, workers):
    """They are looked at before it is said that it does not hold them."""
    server.put(lock("k", holders=[holder()]))
    workers["w1"] = known(**{"is": "active", "keys": ["k"], "task": "shop.export"})
    says(why("id-1", "--key", "other"), "running", "it has held lock 'k'")


# Its result, or its reservation, says something.


ENDED = {
    "success": ("SUCCESS", 7),
    "failure": ("FAILURE", ValueError("no")),
    # A reason is never a bare name, as the text of a KeyError is.
    "no such task": ("FAILURE", NotRegistered("queue")),
    "a bare name": ("FAILURE", KeyError("queue")),
    "no words": ("FAILURE", ValueError()),
    "revoked": ("REVOKED", TaskRevokedError("revoked")),
    "dropped": ("REVOKED", TaskRevokedError("dropped by ann")),
    "rejected": ("REJECTED", None),
    "ignored": ("IGNORED", None),
}


@pytest.mark.parametrize("case", ENDED)
def test_it_has_ended(why, store, case):
    """How, when and why."""
    store(*ENDED[case])
    assert_told(why(), f"it has ended: {case}")


def test_it_is_put_off_and_nobody_has_it(why, store):
    """Its message is with the broker, as with native delayed delivery."""
    store("RETRY", LockHeldError("k", "shop.export[1] on w1", 9.0))
    says(why(), "put off", "with the broker or with a worker", "lock 'k' is held by shop.export[1]")


def test_its_result_says_more_than_the_lock_server(why, server, store):
    """It was parked for a lock that knows nothing of it; or has begun, as Celery says."""
    store("PARKED", {"key": "k"})
    answer = why()
    says(answer, "not in line", "was parked for lock 'k', and this lock server knows nothing")
    # A task whose parking got no reply keeps that result, and its message is to come.
    assert "a task that was put off there waits in its queue" in answer["remedy"]
    says(why(ID, "--key", "l", code=FOUND), "not known", "whether it still is is not known")
    server.send("SET", f"dislock:{{k}}:done:{ID}:0:0", "1")
    says(why(), "ended", "has left the line of lock 'k'")  # an Ignore in its body leaves PARKED
    server.send("DEL", f"dislock:{{k}}:done:{ID}:0:0")
    store("STARTED")
    says(why(code=FOUND), "not known", "is STARTED as its result says")


@pytest.mark.parametrize("state", ["being sent", "running", "ended", "waiting"])
def test_its_key_is_reserved_for_it(why, server, state):
    """Its message is sent, or waits, or its task has begun or ended."""
    server.put(lock("k", reservation=RESERVED._replace(state=state)))
    assert_told(why(), f"its key is reserved: {state}")


@pytest.mark.parametrize("messages", [0, 2, None])
def test_its_message_waits_in_its_queue_or_is_lost(
    why, app, server, workers, monkeypatch, messages
):
    """The queue is that of the app's task with this key."""
    unique = {"lock_unique_until": "end", "lock_unique_for": 20.0}

    @app.task(base=SingletonTask, name="m", lock_key="k", shared=False, **unique)
    def mail(): ...

    app.conf.task_routes = {"m": "mail"}
    monkeypatch.setattr(Site, "messages_in", lambda *_: messages)
    server.put(lock("k", reservation=RESERVED))
    workers["w1"] = known()
    answer = why()
    lost = "and nothing waits in its queue mail: it was purged"
    waits = "and no worker that answers has it: it waits with the broker"
    says(answer, "sent", lost if messages == 0 else waits)
    remedy = (
        "celery dislock free --reservation k"
        if messages == 0
        else "celery worker --dislock -Q mail"
    )
    assert remedy in answer["remedy"]


def unique(key, seconds):
    """Make a task whose messages reserve this key for so long, in a queue of their own."""
    options = TaskOptions(lock_unique_until="end", lock_unique_for=seconds)
    return UniqueTask([key], "mail", options)


def test_what_is_due_later_for_one_task_of_its_key_is_not_lost(why, server, monkeypatch):
    """Which of the tasks it is cannot be told; doctor and lists go by the same time.

    Its queue is empty until it is due, as with native delayed delivery.
    """
    tasks = [unique("k", hours * 3600.0) for hours in (1, 2)]
    monkeypatch.setattr(Site, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(Site, "messages_in", lambda *_: 0)
    for since, state in ((900.0, "not due"), (4500.0, "sent")):  # the first, with an ETA in an hour
        kept = RESERVED._replace(since=since, remaining=7200.0 - since)
        server.put(lock("k", reservation=kept))
        answer = why()
        says(
            answer,
            state,
            "was sent 15 min ago, and is due in 45 min: until" if state == "not due" else "purged",
        )
        assert ("It starts by itself then. If" in answer["remedy"]) is (state == "not due")
        found = troubles_of(lock("k", reservation=kept), Site(server))
        assert [one.name for one in found] == ([] if state == "not due" else ["unmet"])


@pytest.mark.parametrize("key", ["1|2", "mail:Ann O'Neil", "export:$(id);#`id`", "TICKET:7", "KEY"])
def test_a_shell_reads_each_command_as_it_is_meant(why, server, key):
    """Keys and ids come from anybody, and people paste what they are told."""
    parked = place(id="|KEY", ticket="|KEY:0:0", turns=3)
    server.put(lock(key, holders=[holder()]), lock(f"l:{key}", waiting=1, line=[place()]))
    free = ["celery", "dislock", "free", "--terminate", key]
    assert shlex.split(why("id-1")["remedy"].partition(": ")[2]) == free
    show = ["celery", "dislock", "show", f"l:{key}"]
    assert shlex.split(why("parked-1")["remedy"].partition(": ")[2]) == show
    server.put(lock("k", waiting=1, line=[parked]))
    assert why("|KEY")["remedy"].endswith("celery dislock drop '|KEY:0:0'")


def test_what_is_reserved_for_several_keys_is_freed_by_its_task(why, server, monkeypatch):
    """Their name for people is no key of a lock."""
    monkeypatch.setattr(Site, "tasks_of", lambda *_: [unique("a", 20.0)])
    monkeypatch.setattr(Site, "messages_in", lambda *_: 0)
    name = "dislock:{a}:and:0123456789abcdef0123456789abcdef"
    server.put(lock("a and others", name=name, reservation=RESERVED))
    remedy = why()["remedy"]
    assert "celery dislock free --reservation --task NAME --args ARGUMENTS. It may be" in remedy


def test_it_was_a_duplicate(why, app, server):
    """Its sender has chosen the id; the first one's is told.  Another leaves nothing."""
    mail = declare(app, lock_unique_until="end")
    for task_id in ("first", ID, None):
        assert mail.apply_async(task_id=task_id).id == "first"
    for args in ((), ("--key", "k")):
        answer = why(ID, *args)
        says(answer, "duplicate", "was never sent: it was a duplicate of task first, whose message")
        assert answer["about"] == {"duplicate_of": "first"}
    unsent = {name: ms for name, ms in server.ttls().items() if ":unsent:" in name}
    assert list(unsent) == [f"dislock:{{k}}:unsent:{ID}"]
    assert 0 < unsent[f"dislock:{{k}}:unsent:{ID}"] <= 7_200_000
    server.send("DEL", "dislock:{k}:unique")
    mail.apply_async(task_id=ID)
    says(why(), "sent")


# Nothing is known, or not everything.


def test_nobody_knows_it(why, server, workers):
    """Who was asked is told, and what it can mean."""
    workers |= {"w1": known(), "w2": {"error": "KeyError('dislock_task')"}}
    answer = why(code=FOUND)
    says(answer, "not known", f"Nothing is known here of task {ID}.")
    assert answer["rests_on"] == [
        "lock server: no lock names it",
        "workers: w1, w2 answered, and none has it",
    ]
    assert "never have been sent" in answer["remedy"]
    told = why(ID, "--key", "k", "--key", "l", code=FOUND)["rests_on"]
    assert "lock server: lock 'k' and 'l' does not name it" in told


def test_what_cannot_be_asked_is_told(why, app, server, workers, monkeypatch):
    """The broker, the result backend, and a lock server that does not answer."""
    workers["w1"] = OSError("no broker")
    monkeypatch.setattr(app.backend, "get_task_meta", lambda _id: 1 / 0)
    server.error = StoreError("redis://h", "away")
    answer = why(code=AWAY)
    says(answer, "not known", "Nothing is known of task id-9, and the lock server is away.")
    assert answer["rests_on"] == [
        "result: not asked: division by zero",
        "lock server: has not told: lock server redis://h: away",
        "workers: not asked: the broker: no broker",
    ]
    assert answer["away"]


def test_what_the_others_tell_is_told_without_the_lock_server(why, server, workers, store):
    """It is in line, or runs, as far as they know."""
    server.error = StoreError("redis://h", "away")
    store("PARKED", {"key": "k"})
    says(why(code=AWAY), "not known", "was parked for lock 'k'; whether it still is is not known.")
    workers["w1"] = known(**{"is": "active", "keys": ["k"]})
    says(why(code=AWAY), "running", "whether it holds lock 'k' is not known.")
    store("SUCCESS")
    says(why(), "ended", "has succeeded")


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_a_result_that_others_cannot_have_is_not_asked_for(why, app, backend):
    """It is told that nobody has asked."""
    vars(app).pop("backend", None)
    app._local = type(app._local)()
    app.conf.result_backend = backend
    app._backend_cache = None
    told = " ".join(why(code=FOUND)["rests_on"])
    assert "result: not asked: " in told


@pytest.mark.parametrize("bound", ["KEYS_MOST", "LOOKS_MOST"])
def test_not_all_keys_are_looked_at(why, server, monkeypatch, bound):
    """A most number; then the answer says so, and how to find it."""
    server.put(lock("k", holders=[holder()]))
    monkeypatch.setattr(find, bound, 1)
    told = "lock server: not all of its keys were looked at; name the lock with --key"
    assert told in why(code=FOUND)["rests_on"]


def test_a_task_that_moves_on_is_looked_at_again(why, server, store, monkeypatch):
    """It claims its turn, or ends, while it is looked at."""

    def begins(*_args):
        server.put(lock("k", holders=[holder(id="parked-1", owner="parked-1@w:1/a.1")]))

    def ends(*_args):
        server.put(lock("k"))
        store("SUCCESS", task_id="parked-1")

    for moves, state in ((begins, "running"), (ends, "ended")):
        store("PARKED", task_id="parked-1")
        server.put(lock("k", waiting=1, line=[place()]))
        with monkeypatch.context() as patch:
            patch.setattr(find.Search, "where", moves)
            assert why.once("parked-1")["state"] == state


def test_a_lease_that_has_ended_hides_nothing(why, server):
    """Its record may stay beside that of another until somebody takes the lock."""
    server.put(lock("k", holders=[holder(remaining=-1.0)]))
    says(why("id-1", code=FOUND), "not known")
    server.put(lock("a", holders=[holder(remaining=-1.0)]), lock("z", holders=[holder()]))
    says(why("id-1"), "running", "lock 'z'")


def test_a_damaged_lock_hides_nothing_else(why, server):
    """Other locks are looked into; one that the task needs is told as damaged."""
    server.damage("a")
    server.put(lock("k", holders=[holder()]))
    says(why("id-1"), "running")
    server.put(lock("d", waiting=1, line=[place()]))
    server.send("SET", "dislock:{d}:places", "?")
    answer = why("parked-1", code=AWAY)
    assert "cannot be used" in answer["away"]


@pytest.mark.parametrize("task_id", ["\x1b[31m*?[a-z]\\", "{}", "*", "9" * 10_000, "\ud800", ""])
def test_a_hostile_id_is_text(dislock, server, workers, task_id):
    """In a pattern of Redis, and on the screen."""
    server.put(lock("k", holders=[holder()], waiting=1, line=[place()]))
    answer = dislock("why", task_id)
    assert answer.exit_code == FOUND
    assert " ".join(answer.stdout.split()).startswith("Nothing is known here of task ")
    assert "\x1b" not in answer.stdout
    assert len(answer.stdout) < 2000


def test_an_id_is_not_that_of_another(why, server):
    """One may begin with another, or look like its ticket."""
    server.put(lock("k", waiting=2, line=[place(1, id="a:1", ticket="a:1:0:0")]))
    for other in ("a", "a:1:0", "a:1:0:0", ":1"):
        says(why(other, code=FOUND), "not known")
    says(why("a:1"), "in line")


# Words.


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (21, "21st")],
)
def test_ordinals(number, word):
    """As English has them."""
    assert nth(number) == word


def test_a_time_has_its_date_if_it_is_far():
    """And one that is none is no harm."""
    assert at(time.time() + 60).endswith(("in 60 s", "in 59 s"))
    assert at(0.0).startswith(("1970-01-01", "1969-12-31"))
    assert at(1e300) == "?"


def test_times_of_backends_are_read():
    """In UTC if they do not say so; what is none is none."""
    assert asked._unix("2030-01-01T00:00:00") == asked._unix("2030-01-01T00:00:00+00:00")
    assert asked._unix("yesterday") is None
    assert asked._unix(None) is None
