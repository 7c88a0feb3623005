"""Uniqueness when sending: what is published, what is reserved, and what callers get."""

import contextlib
import random
from datetime import datetime, timedelta, timezone

import pytest
from celery import Task, shared_task
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from greenlet import getcurrent, greenlet
from kombu.exceptions import OperationalError
from redis.exceptions import ResponseError

from celery_dislock import DuplicateTaskError, LockLostError, SingletonTask, StoreError
from celery_dislock.exceptions import ForbiddenError
from celery_dislock.keys.names import ticket_of_request
from celery_dislock.servers.connections import store_error
from celery_dislock.signals import task_deduplicated
from tests.declaring import declare, never
from tests.driven import new_app, reservation
from tests.unit.deliveries import deliver, noted

LOCK = "dislock:{k}"
EDITIONS = 60
HOUR = 3600
OUTAGE = [
    "Messages of unique tasks are sent without reservations",
    "Messages of unique tasks are reserved again.",
]


def by_doc(self, doc): ...


def looks(self):
    return reservation(self)


def unique(app, *body, **options):
    return declare(app, *body, **{"lock_unique_until": "start", **options})


def noting(app, **options):
    """Declare a unique task, and return it with the ids of those that ran."""
    ran = []
    return unique(app, lambda self: ran.append(self.request.id), **options), ran


def deliver_all(task, messages):
    for one in messages:
        deliver(task, one.id, headers=one.headers)


@pytest.fixture
def task(app):
    return unique(app)


@pytest.fixture
def publishing(broker, monkeypatch):
    """Do something when a message is about to be published."""

    def call(first):
        take = broker.take

        def publish(*args, **options):
            monkeypatch.setattr(broker, "take", take)
            first()
            return take(*args, **options)

        monkeypatch.setattr(broker, "take", publish)

    return call


def test_a_message_is_reserved_published_and_confirmed(task, lock_server, broker, publishing):
    """In this order, under one id, which a header of the message has with the key's name."""
    before = []
    publishing(lambda: before.append(reservation(task)))
    headers = {"mine": 1}
    result = task.apply_async(task_id="a b", headers=headers)
    [being_sent], sent = before, reservation(task)
    assert (being_sent.id, being_sent.state) == ("a b", "being sent")
    assert being_sent.remaining == pytest.approx(10, abs=0.1)
    assert (sent.id, sent.state, sent.remaining) == ("a b", "waiting", pytest.approx(3600, abs=0.1))
    assert (broker.last.headers["mine"], headers) == (1, {"mine": 1})  # the caller's stay
    assert broker.last.notes["unique"] == [LOCK, "start", sent.mark, 0]
    assert (result.id, result.duplicate, lock_server.requests) == ("a b", False, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"lock_unique_until": "end"},
        {"lock_on_conflict": "cancel"},
        {"lock_on_conflict": "queue", "lock_queue_limit": 1, "lock_queue_overflow": "replace"},
    ],
    ids=str,
)
@pytest.mark.parametrize("linked", [False, True])
def test_headers_may_be_pairs(app, broker, options, linked):
    """Celery takes what a dict takes."""
    task = declare(app, **options)
    task.apply_async(headers=[("tenant", 7)], link=task.si() if linked else None)
    assert broker.last.headers["tenant"] == 7


@pytest.mark.parametrize(
    "send",
    [
        lambda _, task: task.delay(1),
        lambda _, task: task.apply_async((), {"doc": 1}),
        lambda _, task: task.s(1).delay(),
        lambda _, task: task.si(1).apply_async(),
        lambda app, _: app.send_task("shop.t", (1,)),
        lambda app, _: app.send_task("shop.t", (), {"doc": "1"}, 0),
        lambda app, _: app.signature("shop.t", (1,)).delay(),
    ],
)
def test_every_way_to_send_is_one(app, broker, send):
    """There is no way around it, and arguments are bound as in a call."""
    task = unique(app, lock_key="edit:<doc>")
    first = task.delay(1)
    again = send(app, task)
    assert (again.id, again.duplicate, again.ignored) == (first.id, True, False)
    assert broker.ids == [first.id]
    assert task.delay(2).duplicate is False


@pytest.mark.parametrize("on_duplicate", ["return", "raise", "replace"])
def test_an_id_that_is_given_to_all(app, broker, on_duplicate):
    """Five sends with one id are one message and four duplicates, but for "replace"."""
    task = unique(app, lock_on_duplicate=on_duplicate)
    sent = []
    for _ in range(5):
        with contextlib.suppress(DuplicateTaskError):
            sent.append(task.apply_async(task_id="mine").duplicate)
    expected = {"return": [False, *[True] * 4], "raise": [False], "replace": [False] * 5}
    assert sent == expected[on_duplicate]
    assert len(broker.sent) == (5 if on_duplicate == "replace" else 1)
    if on_duplicate == "raise":
        with pytest.raises(DuplicateTaskError) as refused:
            task.delay()
        assert (refused.value.key, refused.value.id) == ("k", "mine")
    if on_duplicate == "replace":  # with the mark of the key and a greater number
        notes = [one.notes["unique"] for one in broker.sent]
        assert {tuple(one[:3]) for one in notes} == {(LOCK, "start", reservation(task).mark)}
        numbers = [one[3] for one in notes]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_duplicate_knows_of_results_that_are_not_stored(task, broker, first, second):
    """That of the first, which its sender has said, and its own, as Celery's results do."""
    task.apply_async(ignore_result=not first)
    result = task.apply_async(ignore_result=not second)
    assert (result.first.has_result, result.ignored) == (first, not second)


@pytest.mark.parametrize("on_duplicate", ["return", "raise", "sooner"])
def test_a_duplicate_has_a_signal(app, broker, receiving, on_duplicate):
    """With the task, its key and the id of the message that stays; the first one has none."""
    task, heard = unique(app, lock_on_duplicate=on_duplicate), []

    def hear(sender, **told):
        heard.append((sender, told["key"], told["task_id"]))

    with receiving(task_deduplicated, hear):
        first = task.delay()
        assert heard == []
        with contextlib.suppress(DuplicateTaskError):
            task.delay()
    assert heard == [(task, "k", first.id)]


def test_a_duplicate_has_the_class_that_its_caller_asks_for(app, task, broker):
    """As a result of Celery's has: with a constructor of its own, too."""

    class Mine(AsyncResult):
        def __init__(self, task_id):
            super().__init__(task_id, app=app)
            self.mine = True

    task.apply_async(task_id="first")
    result = app.send_task("shop.t", result_cls=Mine)
    assert isinstance(result, Mine)
    assert (result.id, result.mine, result.duplicate) == ("first", True, True)


def test_a_sender_that_is_publishing_is_waited_for(task, lock_server, broker, publishing):
    """Its message may never come; when it has, it is the first."""
    publishing(getcurrent().switch)
    first = greenlet(task.delay)
    first.switch()
    lock_server.after(0.5, first.switch)
    result = task.delay()
    assert (result.duplicate, broker.ids) == (True, [result.id])


def test_a_sender_that_died_is_waited_for_a_second(task, lock_server, broker, publishing):
    """Then the message is sent without a reservation.  The key is free after ten seconds."""

    def dies():
        lock_server.away = True
        raise SystemExit

    publishing(dies)
    with pytest.raises(SystemExit):
        task.delay()
    lock_server.away, began = False, lock_server.clock()
    assert task.delay().duplicate is False
    assert 1 <= lock_server.clock() - began < 1.1
    assert broker.last.notes == {}
    lock_server.advance(9)
    assert reservation(task) is None


def test_what_cannot_be_published_is_not_reserved(task, broker, publishing):
    """The reservation is given back, and the error is the caller's."""
    publishing(lambda: {}["broker"])
    with pytest.raises(KeyError):
        task.delay()
    assert reservation(task) is None


def test_a_publisher_that_fails_after_its_task_has_begun_leaves_the_key(app, broker, publishing):
    """The broker had the message: its reservation ends with its task."""

    def waits():
        getcurrent().parent.switch()

    task = unique(app, waits, lock_unique_until="end")

    def loses_its_reply():
        left = reservation(task)
        worker.switch(task, "a", notes={"unique": [LOCK, "end", left.mark, left.number]})
        raise ConnectionError

    worker = greenlet(deliver)
    publishing(loses_its_reply)
    with pytest.raises(ConnectionError):
        task.apply_async(task_id="a")
    assert reservation(task).state == "running"
    worker.switch()
    assert reservation(task) is None


def test_a_lock_server_that_is_away_is_left_alone_for_a_while(task, lock_server, broker, caplog):
    """The first sender finds out, those after it do not ask; one line at each end of the outage."""
    caplog.set_level("INFO", "celery_dislock")
    lock_server.away = True
    assert [task.delay().duplicate for _ in range(10)] == [False] * 10
    assert (len(broker.sent), lock_server.requests) == (10, 1)
    lock_server.advance(5)
    task.delay()
    assert lock_server.requests == 2
    lock_server.advance(5)
    lock_server.away = False
    assert [task.delay().duplicate for _ in range(2)] == [False, True]
    assert [message.split(":")[0] for message in caplog.messages] == OUTAGE


@pytest.mark.parametrize("error", [StoreError("x", "READONLY"), ForbiddenError("x", "NOPERM")])
def test_a_server_that_answers_errors(task, lock_server, broker, caplog, error):
    """As one that does not answer: all is sent, with one warning, and it is left alone."""
    lock_server.strike(error)
    assert [task.delay().duplicate for _ in range(6)] == [False] * 6
    assert (lock_server.requests, [one.notes for one in broker.sent]) == (1, [{}] * 6)
    assert caplog.text.count("are sent without reservations") == 1


def test_a_lock_server_without_memory_is_an_outage_until_it_takes_a_key(
    app, lock_server, broker, caplog
):
    """That it answers what it reads, as for a duplicate, ends nothing."""
    caplog.set_level("INFO", "celery_dislock")
    task = unique(app, lambda doc: doc, lock_key="edit:<doc>")
    full = ResponseError("OOM command not allowed")
    task.delay(1)
    for doc in (2, 1, 3, 1, 4):
        if doc in {2, 3}:
            lock_server.strike(store_error(lock_server.name, full))
        assert task.delay(doc).duplicate is (doc == 1)
        lock_server.advance(5)
    assert [message.split(":")[0] for message in caplog.messages] == OUTAGE


def test_a_key_that_is_damaged_is_no_outage(app, lock_server, broker, caplog):
    """The server answers, and other keys are well: each is asked for, and each failure is told."""
    lock_server.send("RPUSH", "dislock:{edit:1}:unique", "x")
    task = unique(app, lambda doc: doc, lock_key="edit:<doc>")
    assert [task.delay(key).duplicate for key in (1, 2, 2)] == [False, False, True]
    [message] = caplog.messages
    assert message.startswith("A message is sent without a reservation: ")


def test_an_outage_can_be_an_error(app, task, lock_server, broker):
    """dislock_on_unavailable="raise": nothing is sent."""
    app.conf.dislock_on_unavailable = "raise"
    lock_server.away = True
    with pytest.raises(StoreError):
        task.delay()
    assert broker.sent == []


def test_a_lock_server_that_goes_away_after_publishing_harms_nothing(
    task, lock_server, broker, publishing
):
    """The reservation ends sooner than it should."""
    publishing(lambda: setattr(lock_server, "away", True))
    assert task.delay().id == broker.last.id


@pytest.mark.parametrize(
    "thrown", [ValueError("x"), SoftTimeLimitExceeded(), LockLostError("", "")]
)
def test_a_key_that_cannot_be_built_sends_all_the_same(app, broker, caplog, thrown):
    """The worker fails the task.  But what is thrown into a body that sends ends that body."""

    def key(doc):
        raise thrown

    task = unique(app, lock_key=key)
    if isinstance(thrown, ValueError):
        assert task.delay().duplicate is False
        assert "its key is unknown: ValueError('x')" in caplog.text
    else:
        with pytest.raises(type(thrown)):
            task.delay()
    assert len(broker.sent) == isinstance(thrown, ValueError)


# What is sent again

AGAIN = pytest.mark.parametrize(
    "again", [{"retries": 1}, {"replaced_task_nesting": 1}], ids=["retry", "replace"]
)


@AGAIN
def test_what_is_sent_again_is_never_dropped(app, lock_server, broker, again):
    """Nor does it replace what is newer, or wait for it; it keeps its mark and number.

    The end of its burst makes no retry come at once.
    """
    task = unique(app, lock_on_duplicate="replace", lock_replace_for=30)
    task.apply_async(task_id="a", countdown=20)
    mine = broker.last.headers
    lock_server.advance(29)
    task.apply_async(task_id="newer", countdown=20)
    assert broker.last.delay < 2
    headers = {"dislock": mine["dislock"]}
    assert task.apply_async(task_id="a", headers=headers, countdown=60, **again).id == "a"
    assert broker.last.notes["unique"] == mine["dislock"]["unique"]
    assert broker.last.delay > 50
    assert reservation(task).id == "newer"


@pytest.mark.parametrize(
    "header", [None, "forged", ["dislock:{other}", "start", "ab", 3], [LOCK, "start", "ab", "3x"]]
)
def test_what_is_sent_again_without_a_number_of_this_key_has_none(task, broker, header):
    """It had no reservation, is of another key now, or somebody has made the header up."""
    task.apply_async(task_id="a", headers=noted(unique=header), retries=1)
    assert broker.last.notes["unique"] == [LOCK, "start", reservation(task).mark, 0]


@pytest.mark.parametrize("protocol", [1, 2])
def test_what_replaces_a_task_says_so(app, broker, protocol):
    """Its ticket is another one than that of the task; Celery's protocol 1 leaves the number out.

    It adds to the headers of its sender.
    """
    app.conf.task_protocol = protocol
    for declared in ({}, {"lock_queue_overflow": "replace"}):
        task = unique(app, lock_on_conflict="queue", **declared)
        task.apply_async(task_id="a", headers=[("mine", 1)], replaced_task_nesting=2)
        request = Context({"id": "a", **broker.last.headers})
        assert (ticket_of_request(request), request.mine) == ("a:0:2", 1)


# For how long


def in_nine_minutes():
    return datetime.now(timezone.utc) + timedelta(minutes=9)


@pytest.mark.parametrize(
    ("declared", "sent", "kept"),
    [
        ({"lock_unique_for": 0.25}, {}, 0.25),  # shorter than the time to publish
        ({}, {"countdown": 100}, 3700.0),
        ({}, {"expires": 60}, 60.0),
        ({"lock_unique_until": "end"}, {"expires": 9000}, 3600.0),
        ({"lock_unique_until": "end"}, {"expires": -5}, 0.0),
        ({}, {"expires": in_nine_minutes}, 540.0),
        ({"lock_unique_until": "expiry"}, {"expires": 60}, 3600.0),
        ({}, {"eta": datetime.max.replace(tzinfo=timezone.utc)}, 365 * 86400.0),
        ({}, {"eta": lambda: in_nine_minutes().isoformat()}, 4140.0),
    ],
)
def test_for_how_long_a_message_keeps_its_key(app, lock_server, broker, declared, sent, kept):
    """From when its task is due, and no longer than the message; "expiry" as long as it says.

    The lock server's clock is years behind the sender's here: an absolute time is the sender's.
    """
    task = unique(app, **declared)
    task.apply_async(**{name: one() if callable(one) else one for name, one in sent.items()})
    left = reservation(task)
    remaining = left.remaining if left else 0.0
    assert remaining >= kept if kept > 10_000 else remaining == pytest.approx(kept, abs=60)
    lock_server.advance(remaining + 0.01 if remaining < 10_000 else 0)
    assert (reservation(task) is None) is (kept < 10_000)


@pytest.mark.parametrize(
    ("options", "burst", "delay"),
    [
        ({"countdown": 20}, 5, 20),
        ({"countdown": 20}, 15, 15),
        ({"countdown": 20}, 40, 0),
        ({}, 5, 0),
    ],
)
def test_a_burst_has_an_end(app, lock_server, broker, options, burst, delay):
    """From lock_replace_for after its first message on, the newest is due."""
    task = unique(app, lock_on_duplicate="replace", lock_replace_for=30)
    task.apply_async(countdown=20)
    lock_server.advance(burst)
    task.apply_async(**options)
    assert broker.last.delay == pytest.approx(delay, abs=1.5)


@pytest.mark.parametrize("name", ["link", "link_error", "chain", "chord", "group_id"])
def test_what_belongs_to_more_is_seen(task, lock_server, broker, name):
    """It is sent and reserves nothing; an empty value counts for the last step of a chain alone."""
    more = {"group_id": "x"}.get(name, [] if name == "chain" else task.si())
    assert task.apply_async(**{name: more}).duplicate is False
    assert lock_server.requests == 0
    task.apply_async(**{name: None})
    assert reservation(task) is not None
    assert task.apply_async(**{name: more}).duplicate is False
    assert len(broker.sent) == 3


@pytest.mark.parametrize("left", [0.002, 0.001, 0.0005, 0.0])
def test_the_last_moment_of_another_reservation(app, lock_server, publishing, broker, left):
    """A task whose key another message has begins, and its lock is not granted by half."""
    task = unique(app, lambda: "ran", lock_on_duplicate="replace", lock_unique_until="end")
    task.apply_async(task_id="a")
    publishing(lambda: (setattr(lock_server, "away", True), {}["it dies"]))
    with pytest.raises(KeyError):
        task.apply_async(task_id="b")
    lock_server.away = False
    lock_server.advance(10 - left)
    assert deliver(task, "a", headers=broker.last.headers).retval == "ran"
    assert lock_server.locks() == []
    assert all(ttl > 0 for ttl in lock_server.ttls().values())


def test_of_many_editions_the_newest_runs_and_the_record_stays_small(app, lock_server, broker):
    """None but the newest runs, in whatever order they come; the state is one small record."""
    task, ran = noting(app, lock_on_duplicate="replace")
    ids = [task.delay().id for _ in range(EDITIONS)]
    messages = broker.sent * 2  # each comes twice
    random.Random(1).shuffle(messages)
    deliver_all(task, messages)
    assert set(ran) == {ids[-1]}
    assert {str(app.AsyncResult(one).result)[-36:] for one in ids[:-1]} == {ids[-1]}
    assert [*lock_server.ttls()] == [f"{LOCK}:unique"]
    assert len(lock_server.contents()[f"{LOCK}:unique"]) < 250


# Of two messages the sooner one


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_of_two_messages_the_sooner_one_runs(app, broker, until):
    """An urgent send is not swallowed by one that is planned for the night; one of them runs."""
    task, ran = noting(app, lock_on_duplicate="sooner", lock_unique_until=until)
    night = task.apply_async(countdown=8 * HOUR)
    assert task.apply_async(countdown=9 * HOUR).id == night.id
    urgent = task.delay()
    assert not urgent.duplicate
    assert task.delay().id == task.apply_async(countdown=60).id == urgent.id
    assert broker.ids == [night.id, urgent.id]
    deliver_all(task, reversed(broker.sent))
    assert ran == [urgent.id]
    assert urgent.id in str(app.AsyncResult(night.id).result)
    assert app.AsyncResult(night.id).state == "REVOKED"


@pytest.mark.parametrize(
    ("first", "second", "is_sooner"),
    [
        ({"countdown": 60}, {"countdown": 58.5}, True),
        ({"countdown": 60}, {"countdown": 59.5}, False),
        ({"countdown": 0.5}, {}, False),
        ({"eta": HOUR}, {"eta": HOUR}, False),
        ({"eta": HOUR}, {"eta": HOUR - 2}, True),
        ({"countdown": -5}, {}, False),
        ({}, {"eta": -HOUR}, False),
        ({"countdown": 2e10}, {"countdown": 1e10}, False),
    ],
)
def test_what_is_due_at_about_the_same_time_is_not_sooner(app, broker, first, second, is_sooner):
    """By more than a second; senders' clocks differ.  What is due now is not sooner than that."""

    def sent(**when):
        if "eta" in when:
            when["eta"] = datetime.now(timezone.utc) + timedelta(seconds=when["eta"])
        return task.apply_async(**when)

    task = unique(app, lock_on_duplicate="sooner")
    sent(**first)
    assert sent(**second).duplicate is not is_sooner


@pytest.mark.parametrize("until", ["end", "expiry"])
def test_nothing_is_sooner_than_what_has_begun(app, lock_server, broker, until):
    """With "end" and "expiry" its key stays reserved, and what is sent meanwhile is a duplicate."""

    def body(self):
        meanwhile.append(task.delay())

    meanwhile = []
    task = unique(app, body, lock_on_duplicate="sooner", lock_unique_until=until)
    first = task.apply_async(countdown=60)
    deliver(task, first.id, headers=broker.last.headers)
    assert [one.id for one in meanwhile] == [first.id]
    assert task.delay().duplicate is (until == "expiry")


def test_a_retry_is_as_soon_as_it_comes_again(app, broker):
    """A retry in an hour gives way to what is sent now, and one that is due has the key."""

    def body(self):
        raise self.retry(countdown=HOUR)

    task = unique(app, body, lock_on_duplicate="sooner", lock_unique_until="end")
    first = task.delay()
    deliver(task, first.id, headers=broker.last.headers)
    retry = broker.last
    assert (retry.id, retry.delay) == (first.id, pytest.approx(HOUR, abs=1))
    assert task.apply_async(countdown=2 * HOUR).id == first.id
    urgent = task.delay()
    assert not urgent.duplicate
    deliver(task, first.id, headers=retry.headers)
    assert app.AsyncResult(first.id).state == "REVOKED"


def test_a_sooner_one_that_was_not_published_hides_nothing(app, broker, lock_server):
    """Its sender has died, or the broker was away: the planned one runs."""
    task, ran = noting(app, lock_on_duplicate="sooner", lock_limit=None)
    night = task.apply_async(countdown=HOUR)
    broker.times_away = 9
    with pytest.raises(OperationalError):
        task.delay()
    lock_server.advance(HOUR)
    deliver(task, night.id, headers=broker.last.headers)
    assert ran == [night.id]


def test_an_eager_task_is_due_when_it_is_called(app, broker):
    """Whatever its countdown says: nothing waits there."""
    ran = []
    task = unique(app, lambda: ran.append(1), lock_on_duplicate="sooner", lock_unique_until="end")
    task.apply_async(countdown=60)
    assert not task.apply(countdown=90).duplicate
    assert ran == [1]


@pytest.mark.parametrize("was", ["return", "replace"])
def test_a_message_of_older_code_counts_as_due_when_it_was_sent(app, broker, was):
    """A deploy that brings the option finds messages whose time is not known."""
    task = unique(app, lock_on_duplicate=was)
    task.apply_async(countdown=HOUR)
    assert unique(app, lock_on_duplicate="sooner", name="newer").delay().duplicate


# The lock server's clock jumps, as in a failover to a server whose clock is another

of_a_wrong_clock = pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])


def test_a_reservation_outlives_no_clock_that_is_set_back(app, lock_server, broker):
    """It lasts for as much longer as the clock was set back, and not for ever."""
    task = unique(app, lock_unique_for=100)
    task.delay()
    lock_server.stall(-HOUR)
    assert task.delay().duplicate is True
    assert 100 < lock_server.ttls()[f"{LOCK}:unique"] / 1000 <= 100 + HOUR
    lock_server.stall(HOUR + 101)
    assert task.delay().duplicate is False


@pytest.mark.parametrize("until", ["start", "end"])
@of_a_wrong_clock
def test_a_task_ends_its_reservation_whatever_the_clock_says(
    app, lock_server, broker, until, ahead
):
    """Ids are compared, and no times: a clock that jumps keeps nobody's key."""
    task = unique(app, looks, lock_unique_until=until)
    task.apply_async(task_id="1", countdown=HOUR)
    lock_server.stall(ahead)
    seen = deliver(task, "1", headers=broker.last.headers).retval
    assert seen is None if until == "start" else seen.id == "1"
    assert reservation(task) is None


@pytest.mark.parametrize(
    ("on_duplicate", "ids", "hours"), [("return", "ab", 1), ("replace", "abc", 3)]
)
def test_a_clock_that_goes_forward_ends_a_reservation(
    app, lock_server, broker, on_duplicate, ids, hours
):
    """The last message is sent, and the first runs, replaced or not, and leaves it the key."""
    task = unique(app, lambda: "ran", lock_on_duplicate=on_duplicate, lock_unique_for=100)
    for task_id in ids:
        lock_server.stall(hours * HOUR if task_id == ids[-1] else 0)
        task.apply_async(task_id=task_id)
    assert deliver(task, "a", headers=broker.sent[0].headers).retval == "ran"
    assert reservation(task).id == ids[-1]


@pytest.mark.parametrize(
    ("jumps", "delays"), [((20, -HOUR, 30), (40, 50, 30)), ((HOUR,), (0,))], ids=["back", "forward"]
)
def test_a_burst_is_never_older_than_the_clock(app, lock_server, broker, jumps, delays):
    """Else a debounce would be postponed for an hour beyond lock_replace_for.

    When the clock goes forward, the newest message is not postponed any more.
    """
    task = unique(app, lock_on_duplicate="replace", lock_replace_for=60, lock_unique_for=2 * HOUR)
    task.apply_async(countdown=50)
    for jump, delay in zip(jumps, delays, strict=True):
        lock_server.stall(jump)
        task.apply_async(countdown=50)
        assert broker.last.delay == pytest.approx(delay, abs=2)


@pytest.mark.parametrize("when", ["before it is confirmed", "after it is confirmed"])
@of_a_wrong_clock
def test_what_was_replaced_does_not_run(app, lock_server, broker, publishing, when, ahead):
    """Whatever the clock says, if the server still has what it was told."""
    task = unique(app, never, lock_on_duplicate="replace", lock_unique_for=2 * HOUR)
    task.apply_async(task_id="a")
    older = broker.last.headers
    if when == "before it is confirmed":
        publishing(lambda: lock_server.stall(ahead))
    task.delay()
    lock_server.stall(ahead if when == "after it is confirmed" else 0)
    deliver(task, "a", headers=older)
    assert app.AsyncResult("a").state == "REVOKED"


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("lock", [1, None])
def test_an_edition_that_was_sent_in_an_outage_always_runs(app, lock_server, broker, nth, lock):
    """It has no number, so it ends no other, and none ends it, whenever it comes."""
    task, ran = noting(app, lock_on_duplicate="replace", lock_limit=lock)
    for task_id in "abc":
        lock_server.away = task_id == "abc"[nth]
        task.apply_async(task_id=task_id)
        lock_server.away = False
        lock_server.advance(5)  # after which it is asked again
    assert [bool(one.notes) for one in broker.sent] == [task_id != "abc"[nth] for task_id in "abc"]
    deliver_all(task, reversed(broker.sent))
    newest = max({*"abc"} - {"abc"[nth]})
    assert ran == sorted({newest, "abc"[nth]}, reverse=True)


# A failover to a replica that knows less


def fail_over(lock_server, known=None):
    """Let a replica take over that has this record of the key alone."""
    lock_server.lose()
    if known:
        lock_server.send("SET", f"{LOCK}:unique", known, "PX", HOUR * 1000)


def test_a_failover_that_loses_a_reservation(app, lock_server, broker):
    """Two messages are sent, and both run; the first ends nothing of the second's."""
    task, ran = noting(app, lock_unique_until="end")
    task.apply_async(task_id="a")
    fail_over(lock_server)
    assert task.apply_async(task_id="b").duplicate is False
    for message, left in zip(broker.sent, ["b", None], strict=True):
        deliver_all(task, [message])
        assert (reservation(task) and reservation(task).id) == left
    assert (ran, lock_server.contents()) == (["a", "b"], {})


def test_a_failover_that_loses_a_replacement(app, lock_server, broker):
    """The older message does not learn that it was replaced: it runs as well, and first."""
    task, ran = noting(app, lock_on_duplicate="replace")
    task.apply_async(task_id="a")
    known = lock_server.send("GET", f"{LOCK}:unique")
    task.apply_async(task_id="b")
    fail_over(lock_server, known)
    assert reservation(task).id == "a"
    deliver_all(task, broker.sent)
    assert (ran, reservation(task)) == (["a", "b"], None)


def test_a_failover_that_loses_an_end(app, lock_server, broker):
    """The key stays reserved for a task that is over, as after a purge: for lock_unique_for."""
    task = unique(app, lock_unique_until="end")
    task.apply_async(task_id="a")
    known = lock_server.send("GET", f"{LOCK}:unique")
    deliver_all(task, broker.sent)
    assert reservation(task) is None
    fail_over(lock_server, known)
    again = task.delay()
    assert (again.id, again.duplicate) == ("a", True)
    assert 0 <= reservation(task).remaining <= HOUR


# Eager tasks


@pytest.fixture(params=["apply", "task_always_eager"])
def call(app, request):
    """Call a task eagerly, in each of the two ways."""

    def call(task, **options):
        app.conf.task_always_eager = request.param == "task_always_eager"
        try:
            return (task.apply if request.param == "apply" else task.apply_async)(**options)
        finally:
            app.conf.task_always_eager = False

    return call


@pytest.mark.parametrize(
    ("until", "inner", "after"),
    [("start", False, False), ("end", True, False), ("expiry", True, True)],
)
def test_an_eager_task_runs_under_its_reservation(app, call, until, inner, after):
    """With "end" as long as it runs; a duplicate has the result of the first, if it ran here."""
    found = []

    def body():
        if not found:
            found.append(None)
            found[0] = call(task)
        return len(found)

    task = unique(app, body, lock_unique_until=until, lock_limit=None)
    first = call(task)
    assert (first.get(), first.duplicate, found[0].duplicate) == (1, False, inner)
    assert (found[0].id == first.id) is inner
    second = call(task)
    assert (second.get(), second.duplicate, second.id == first.id) == (1, after, after)
    assert (reservation(task) is None) is (until != "expiry")


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_an_eager_retry_is_no_duplicate(app, call, until):
    """It runs within the first, under its id.  A task that raises frees its key."""
    ran = []

    def body(self):
        ran.append(self.request.retries)
        if len(ran) < 3:
            raise self.retry(countdown=0)
        if len(ran) > 3:
            raise ZeroDivisionError

    task = unique(app, body, lock_unique_until=until)
    call(task).get()
    assert ran == [0, 1, 2]
    assert (reservation(task) is None) is (until != "expiry")
    if until != "expiry":
        with pytest.raises(ZeroDivisionError):
            call(task, throw=True)
        assert reservation(task) is None


def test_a_message_that_an_eager_call_replaces_ends_when_it_comes(app, broker, call):
    """The call is the newest: it runs."""
    task = unique(app, lambda: "ran", lock_on_duplicate="replace")
    task.apply_async(task_id="older")
    assert call(task).get() == "ran"
    deliver(task, "older", headers=broker.last.headers)
    assert app.AsyncResult("older").state == "REVOKED"


# Revoked by the process that has sent it


@pytest.mark.parametrize("sent_by", ["this process", "another"])
@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_message_that_is_revoked_frees_its_key_unless_it_runs(
    app, broker, monkeypatch, sent_by, state
):
    """A revoke does not stop a task, unless it terminates it: its worker sees that.

    A message of another process is known here if its result was returned as a duplicate.
    """
    task = unique(app, lambda: task.delay().revoke(), lock_unique_until="end")
    told = []
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: told.append(reservation(task)))
    sender = app
    if sent_by == "another":
        sender = new_app("other")
        unique(sender, lock_unique_until="end")
    result = sender.tasks["shop.t"].apply_async(task_id="a")
    if state == "running":
        deliver(task, headers=broker.last.headers, id="a")
    else:
        (task.delay() if sent_by == "another" else result).revoke()
    assert [one and one.id for one in told] == [None if state == "waiting" else "a"]


def test_a_revoke_does_not_fail_with_the_lock_server(app, lock_server, broker, monkeypatch, caplog):
    """Its key stays reserved until that expires; nor does it wait for every message."""
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: None)
    task = unique(app, lambda doc: doc, lock_key="edit:<doc>")
    ids = [task.delay(number).id for number in range(3)]
    lock_server.away, before = True, lock_server.requests
    app.control.revoke(ids)
    assert lock_server.requests == before + 1
    [message] = caplog.messages
    assert message.startswith("A key may stay reserved until its reservation expires: ")


# Apps


@pytest.mark.parametrize(
    ("conf", "options", "reserves"),
    [
        ({"task_always_eager": True}, {}, True),
        ({"dislock_enabled": False}, {}, False),
        ({}, {"lock_unique_until": None}, False),
        ({}, {"retries": 1, "task_id": "other"}, True),
    ],
    ids=["eager", "off", "not unique", "retried"],
)
def test_every_result_says_whether_it_is_a_duplicate(app, broker, conf, options, reserves):
    """Else the caller's code breaks on the day on which the lock server is away."""
    app.conf.update(conf)
    declared = {name: options.pop(name) for name in list(options) if name.startswith("lock_")}
    task = unique(app, **declared)
    assert task.apply_async(**options).duplicate is False
    assert task.apply_async(**options).duplicate is False
    if not conf:
        assert (reservation(task) is not None) is reserves


@pytest.mark.usefixtures("lock_server")
def test_a_shared_task_has_keys_of_each_app(broker):
    """One function, a task of its own in each app, and each app its own keys."""

    @shared_task(name="of-all", base=SingletonTask, lock_key="k", lock_unique_until="start")
    def edit(): ...

    for prefix in ("one", "two"):
        app = new_app(prefix)
        app.conf.dislock_prefix = prefix
        assert [app.tasks["of-all"].delay().duplicate for _ in range(2)] == [False, True]
    assert [one.notes["unique"][0] for one in broker.sent] == ["one:{k}", "two:{k}"]


@pytest.mark.parametrize(
    ("conf", "options"),
    [
        ({"task_annotations": {"shop.t": {"lock_unique_until": "start"}}}, {}),
        ({"dislock_unique_until": "start"}, {}),
        ({"dislock_enabled": True}, {"base": Task, "lock_unique_until": "start"}),
        ({}, {"lock_unique_until": "end"}),
    ],
    ids=["annotation", "setting", "a plain task that is guarded", "bound"],
)
def test_every_way_to_declare_it(app, broker, conf, options):
    """An annotation, a setting, any base class; the bound task is no argument of the call."""
    app.conf.update(conf)
    task = declare(app, by_doc, lock_key="edit:<doc>", **options)
    assert [task.delay(1).duplicate for _ in range(2)] == [False, True]
    assert len(broker.sent) == 1
