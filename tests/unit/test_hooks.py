"""What decides about messages is wrapped for every app: sending them, revoking and ending them."""

import threading
from contextlib import suppress
from datetime import datetime, timezone
from types import SimpleNamespace
from unittest.mock import MagicMock as Mock

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.worker.control import Panel
from celery.worker.state import revoked
from kombu.utils.limits import TokenBucket

from celery_dislock import SingletonTask
from celery_dislock.messages.headers import HEADER
from celery_dislock.plugin import LockStep  # noqa: F401 -- as a worker does
from tests.declaring import declare
from tests.driven import held, reservation
from tests.unit.deliveries import arrived, deliver, lose_process


def unique(app, body=lambda: None, **options):
    return declare(app, body, **{"lock_unique_until": "end", **options})


def plain(app, body=lambda: None, **options):
    """Declare a task that no guard knows, as after a deploy that has changed it."""
    unique(app)
    return declare(app, body, name="plain", base=Task, lock_key=None, **options)


def sent(app, broker, **options):
    """Send a message that is reserved; return our header of it."""
    app.tasks["shop.t"].apply_async(task_id="1", **options)
    return {HEADER: broker.last.headers[HEADER]}


# Guarding


def test_two_threads_may_guard_a_task_at_once(app, lock_server, broker):
    """One that sends it guards it meanwhile; it is reserved, and takes its lock, once."""

    class Steps(type):
        def __setattr__(cls, name, value):
            if threading.current_thread() is here and name in {
                "__call__",
                "apply",
                "dislock_guard",
            }:
                other = threading.Thread(target=lambda: sent.append(task.delay().duplicate))
                other.start()
                other.join()
            super().__setattr__(name, value)

    class Export(SingletonTask, metaclass=Steps):
        name, lock_key, lock_unique_until = "export", "k", "end"

        def run(self):
            return lock_server.locks(), reservation(self).state

    app.finalize()
    here, task, sent = threading.current_thread(), Export(), []
    app.register_task(task)
    assert sent == [False, True, True]
    assert deliver(task, headers=broker.last.headers).retval == (["k"], "running")
    assert task.apply().get() == (["k"], "running")


# Sending


def test_a_task_is_found_by_its_name_before_it_is_made(app, broker):
    """Celery makes the tasks of ``@app.task`` at their first use."""
    unique(app)
    assert "shop.t" not in app._tasks
    app.send_task("shop.t")
    assert reservation(app.tasks["shop.t"]).state == "waiting"


def test_a_name_that_this_process_does_not_know_is_sent_as_it_is(app, lock_server, broker):
    """Its options are known to the workers alone.  An app that must not be finalized is not."""
    other = Celery("x", set_as_current=False, autofinalize=False, broker="memory://here")
    declare(other)
    for each in (app, other):
        assert each.send_task("unknown").duplicate is False
    assert lock_server.requests == 0
    assert not other.finalized


def test_positional_arguments_of_send_task_are_what_they_were(app, broker):
    """A countdown, an ETA and an id: for unique tasks, and for all others."""
    task = unique(app, lambda doc: None, lock_key="edit:<doc>")  # noqa: ARG005
    for name in ("shop.t", "plain"):
        app.send_task(name, (1,), {}, 100, None, f"id of {name}")
    app.send_task("plain", (1,), {}, None, datetime(2030, 1, 2, tzinfo=timezone.utc))
    assert broker.ids[:2] == ["id of shop.t", "id of plain"]
    assert all(one.headers["eta"] for one in broker.sent)
    assert broker.last.headers["eta"].startswith("2030-01-02")
    assert reservation(task, 1).remaining == pytest.approx(3700, abs=20)


def test_a_sender_without_a_lock_server_sends_all_the_same(broker, caplog):
    """Its workers may be told theirs on the command line.  The log says so once."""
    app = Celery("away", broker="amqp://nobody", set_as_current=False)
    app.conf.dislock_metrics = True
    task = unique(app)
    assert [task.delay().duplicate for _ in range(2)] == [False, False]
    assert len(broker.sent) == 2
    [message] = caplog.messages
    assert message.startswith("Messages of unique tasks are sent without reservations: ")


# Revoking


def test_a_list_of_tasks_is_revoked_at_once(app, broker, monkeypatch):
    """It is one message to all workers, which may store the end; and so is an empty one."""
    task = unique(app)
    first = task.delay()
    freed = []
    monkeypatch.setattr(
        app.control, "broadcast", lambda *_, **__: freed.append(reservation(task) is None)
    )
    for ids in ([], [first.id, "other"]):
        app.control.revoke(ids)
    assert freed == [False, True]


@pytest.mark.parametrize(
    ("ids", "where", "frees"),
    [
        (["1"], "reserved", True),
        (["b", "1"], "reserved", True),
        (["b"], "reserved", False),
        (["1"], "active", False),
        (["1"], "timer", True),
        (["1"], "bucket", True),
    ],
)
def test_a_worker_that_is_told_frees_the_key_of_what_it_has(
    app, broker, monkeypatch, ids, where, frees
):
    """Of a message that was prefetched, or that waits for its ETA or its rate limit.

    Those two are in no list of Celery's.
    Its task may not begin for hours.  The key is free before the result is stored.
    """
    task = unique(app)
    request = arrived(task, "1", **sent(app, broker))
    entries = [((), ""), (("b",), ""), ((request, 1), "timer")]
    queue = [
        SimpleNamespace(entry=SimpleNamespace(args=args))
        for args, of in entries
        if of in {"", where}
    ]
    bucket = TokenBucket(1)
    if where == "bucket":
        bucket.add((request, 1))
    consumer = SimpleNamespace(
        timer=SimpleNamespace(schedule=SimpleNamespace(queue=queue)),
        task_buckets={"another": None, task.name: bucket},
    )
    told = SimpleNamespace(
        app=app,
        reserved_requests=[request] if where in {"reserved", "active"} else [],
        active_requests=[request] if where == "active" else [],
        consumer=consumer,
    )
    freed = []

    def revoke(_state, revoked, *_, **__):
        freed.append(reservation(task) is None)
        return revoked

    monkeypatch.setattr("celery.worker.state", told)
    monkeypatch.setattr("celery.worker.control._revoke", revoke)
    assert "flagged as revoked" in Panel.data["revoke"](told, ids)["ok"]
    assert freed == [frees]


WORD = "s3cret"


@pytest.mark.parametrize(
    "url",
    [
        f"rediss://user:{WORD}@h:1/0",
        [f"redis://:{WORD}@a:1", f"redis://user:{WORD}@b:1", f"unix://:{WORD}@/c"],
        (f"redis://{WORD}@a:1", f"no URL {WORD}"),
        {"url": f"redis://:{WORD}@a:1"},
        f"{WORD}",
    ],
)
@pytest.mark.parametrize("name", ["dislock_url", "CELERY_DISLOCK_URL"])
def test_no_report_of_celerys_shows_a_lock_servers_password(url, name):
    """`celery report` and `inspect conf` are what people send to strangers who help them."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    options = {
        "password": WORD,
        "username": "u",
        "socket_timeout": 1.5,
        "sentinel_kwargs": {"password": WORD, "retries": 3},
        "credential_provider": SimpleNamespace(word=WORD),
        "auth": [WORD, {"word": WORD}],
        "pass": 5,
    }
    misspelt = {"dislock_ur1": [f"redis://:{WORD}@a:1"]}
    conf = {name: url, "dislock_transport_options": options, "task_serializer": "json", **misspelt}
    app.conf.update(conf)
    state = SimpleNamespace(app=app)
    for told in (
        app.conf.humanize(),
        app.conf.humanize(with_defaults=True),
        app.bugreport(),
        repr(Panel.data["conf"](state, with_defaults=True)),
        repr(Panel.data["report"](state)),
    ):
        assert WORD not in told
        assert "'socket_timeout': 1.5" in told
        assert "dislock" in told.lower()
    assert app.conf[name] == url
    assert app.conf.table()["task_serializer"] == "json"


def test_a_report_says_which_lock_server_it_is():
    """Without its password; Celery hides those of its own settings."""
    app = Celery("shop", broker=f"redis://:{WORD}@broker:1/0", set_as_current=False)
    app.conf.dislock_url = [f"redis://:{WORD}@{host}:1/0" for host in "abc"]
    told = app.conf.table()
    assert told["dislock_url"] == [f"redis://:***@{host}:1/0" for host in "abc"]
    assert told["broker_url"] == "redis://:********@broker:1/0"
    assert app.conf.table(censored=False)["dislock_url"] == app.conf.dislock_url


# Storing how a task has ended


@pytest.fixture
def seen(app, lock_server, monkeypatch):
    """Each state that is stored or told to a chord, and whether the key is free by then."""
    seen = []

    def see(state):
        lock_server.away = False
        seen.append((state, reservation(app.tasks["shop.t"]) is None))

    monkeypatch.setattr(app.backend, "store_result", lambda _, __, state, **___: see(state))
    monkeypatch.setattr(app.backend, "on_chord_part_return", lambda _, state, __: see(state))
    return seen


ENDS = {  # what is stored, what the body raises, and whether its message has ended by that
    "value": ("SUCCESS", None, True),
    "error": ("FAILURE", ValueError, True),
    "ignore": (None, Ignore, True),
    "reject": (None, Reject, True),
    "retry": ("RETRY", Retry, False),
    "requeue": (None, Reject(requeue=True), False),
    "exit": (None, SystemExit, False),  # it comes again, under its reservation
}
LOCKS = {"none": {"lock_limit": None}, "several": {"lock_key": ["k", "l"]}}


@pytest.mark.parametrize(
    ("until", "to"),
    [*((one, "chord") for one in ("start", "end", "expiry")), ("end", "caller"), ("end", "nobody")],
)
@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("locks", ["one", *LOCKS, "off", "no guard"])
def test_a_key_is_free_when_the_end_of_its_task_can_be_seen(
    app, broker, seen, locks, way, until, to
):
    """Who has the result and sends again is sent; what comes again keeps its key.

    Also where locks are off, and where a deploy has made a task of it that does not lock.
    """
    state, error, ends = ENDS[way]

    def body(self):
        seen.append(reservation(app.tasks["shop.t"]))
        if error is Retry:
            self.retry()
        if error is not None:
            raise error

    ignored, options = to == "nobody", {"lock_unique_until": until, **LOCKS.get(locks, {})}
    task = unique(app, body, ignore_result=ignored, **options)
    headers = sent(app, broker)
    if locks == "no guard":
        task = declare(app, body, name="plain", base=Task, lock_key=None, ignore_result=ignored)
    app.conf.dislock_enabled = False if locks == "off" else None
    with suppress(SystemExit):
        deliver(task, "1", headers=headers, chord={"task": "t"} if to == "chord" else None)
    begun, *stored = seen
    assert (begun and begun.state) == (None if until == "start" else "running")
    told = to == "chord" and state in {"SUCCESS", "FAILURE"}
    is_free = until != "expiry" and (ends or until == "start")
    assert stored == [(state, is_free)] * ((state is not None and not ignored) + told)
    left = reservation(app.tasks["shop.t"])
    assert (left is None) is is_free
    assert left is None or (left.state == "ended") is ends


@pytest.mark.parametrize(("strategy", "state"), [("skip", "REVOKED"), ("raise", "FAILURE")])
def test_a_key_is_free_when_it_can_be_seen_that_its_lock_was_refused(
    app, broker, seen, strategy, state
):
    """Its body never began."""
    task = unique(app, lock_on_conflict=strategy)
    with held(app, task_id="other"):
        deliver(task, "1", headers=sent(app, broker))
        assert seen == [(state, True)]


def test_a_key_is_free_when_it_can_be_seen_that_its_guard_was_never_entered(app, broker, seen):
    """No key can be built from its arguments, or its ``before_start`` raises."""
    unique(app)
    headers = sent(app, broker)
    other = declare(app, lambda doc: None, name="other", lock_key="edit:<doc>")  # noqa: ARG005
    deliver(other, headers=headers)
    assert seen == [("FAILURE", True)]


BY_MAIN = {
    "expired": ("REVOKED", lambda request: request.revoked()),
    "terminated": ("REVOKED", lambda one: one._announce_revoked("terminated", True, "9", False)),
    "too long": ("FAILURE", lambda request: request.on_timeout(False, 1.0)),
    "lost": ("FAILURE", lose_process),
}


@pytest.mark.parametrize("how", BY_MAIN)
@pytest.mark.parametrize("make", [unique, plain])
def test_a_key_is_free_when_the_main_process_says_how_its_task_has_ended(
    app, broker, seen, how, make
):
    """No guard sees that in a pool process; the key is free also where no guard knows the task."""
    state, end = BY_MAIN[how]
    task = make(app)
    about = {"expires": "2001-01-01T00:00:00"} if how == "expired" else {}
    end(arrived(task, "1", **{**sent(app, broker), **about}))
    revoked.discard("1")  # Celery's worker remembers what has expired, and runs no other of that id
    assert seen == [(state, True)]


@pytest.mark.parametrize("make", [unique, plain])
def test_a_message_that_goes_back_to_its_queue_keeps_its_key(app, broker, seen, make):
    """Its process has died, and it runs again."""
    task = make(app, acks_late=True, reject_on_worker_lost=True)
    request = arrived(task, "1", **sent(app, broker))
    request.reject = Mock()
    lose_process(request)
    assert seen == []
    assert reservation(app.tasks["shop.t"]) is not None
    request.reject.assert_called_once_with(requeue=True)


def test_a_lock_server_that_is_away_does_not_keep_an_end_from_being_stored(
    app, lock_server, broker, seen, caplog
):
    """The key is left to expire, and the log says so."""
    task = plain(app)
    headers = sent(app, broker)
    lock_server.away = True
    deliver(task, "1", headers=headers)
    assert seen == [("SUCCESS", False)]
    assert "A key may stay reserved until its reservation expires" in caplog.text
