"""The newest task of a key takes over: what messages say, and how the one that ran ends."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import Ignore
from celery.worker import state
from kombu.pidbox import Mailbox

from celery_dislock import SettingsError, current_lease
from celery_dislock.config.settings import task_options
from celery_dislock.exceptions import SupersededError
from celery_dislock.messages import headers
from celery_dislock.tasks import cancelling
from celery_dislock.tasks import request as recovery
from celery_dislock.worker import cancelled
from tests.declaring import declare, never
from tests.driven import held
from tests.unit.deliveries import arrived, deliver

CANCEL = {"lock_on_conflict": "cancel"}
SENT = 1_700_000_000_000_000  # microseconds


def us():
    return int(time.time() * 1e6)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """What workers were told by remote control."""
    commands = []
    monkeypatch.setattr(Mailbox, "_publish", lambda _, *args, **how: commands.append((args, how)))
    return commands


@pytest.mark.parametrize(("options", "later"), [({}, 0), ({"countdown": 60}, 60_000_000)])
def test_a_message_says_when_it_was_sent(app, broker, options, later):
    """One with an ETA counts as sent then."""
    declare(app, **CANCEL).apply_async(**options)
    assert broker.last.notes["sent"] == pytest.approx(us() + later, abs=1000)


@pytest.mark.parametrize("waits", [True, False])
def test_a_sender_that_does_not_say_it(app, lock_server, broker, waits):
    """It was sent when it first came; its turn, and each retry, keep that."""
    task = declare(app, lambda self: self.retry(countdown=5), bind=True, **CANCEL)
    came, sent = us(), {}
    if waits:
        with held(app, "k", "holder"):
            deliver(task)
        lock_server.advance(60)
        sent = broker.last.headers
        assert came <= broker.last.notes["sent"] <= came + 1000
    deliver(task, headers=sent)
    assert broker.last.headers["retries"] == 1
    assert came <= broker.last.notes["sent"] <= came + 1000


def test_a_clock_that_is_ahead(app, broker):
    """What was sent in the future was sent when it came; its turn and its retries keep that."""
    task = declare(app, never, **CANCEL)
    with held(app, "k", "holder"):
        deliver(task, notes={"sent": us() + 3_600_000_000})
    assert broker.last.notes["sent"] <= us()


def test_a_worker_whose_clock_is_behind(app, monkeypatch):
    """It takes no task for older than the message says: else the newest would not run."""
    task = declare(app, **CANCEL)
    deliver(task, "1", notes={"sent": us() - 2000})
    monkeypatch.setattr(headers, "time", SimpleNamespace(time=lambda: time.time() - 5))
    deliver(task, "2", notes={"sent": us() - 1000})
    assert app.AsyncResult("2").state == "SUCCESS"


@pytest.mark.parametrize("sent", [(2_000_000, 0), (-2, -1)], ids=["a clock is ahead", "in order"])
def test_there_is_room_for_one_in_line(app, broker, sent):
    """A second newcomer takes the place of the first, also if its sender's clock is behind."""
    task = declare(app, never, **CANCEL)
    with held(app, "k", "holder"):
        for task_id, later in zip("12", sent, strict=True):
            deliver(task, task_id, notes={"sent": us() + later})
        assert [one.id for one in task.lock_for().line()] == ["2"]
    assert app.AsyncResult("1").state == "REVOKED"


@pytest.mark.parametrize("sent", [SENT * 1000, -1, "x", None, 1.5, True])
def test_a_time_that_cannot_be_is_now(app, broker, sent):
    """A clock that is ahead, or a forged header, bars no later task."""
    task = declare(app, **CANCEL)
    deliver(task, notes={"sent": sent})
    assert app.AsyncResult("1").state == "SUCCESS"
    deliver(task, task_id="2", notes={"sent": us() + 10})
    assert app.AsyncResult("2").state == "SUCCESS"


def test_what_was_sent_before_the_newest_does_not_run(app):
    """Whether that one runs or has run; also its own retries are no older than it is."""
    task = declare(app, **CANCEL)
    deliver(task, task_id="2", notes={"sent": us() - 5})
    old = declare(app, never, name="old", **CANCEL)
    deliver(old, task_id="1", notes={"sent": us() - 1000})
    assert str(app.AsyncResult("1").result) == "a newer message of key 'k' replaces it: task 2"
    assert app.AsyncResult("1").state == "REVOKED"
    assert deliver(task, task_id="2", notes={"sent": us() - 5}, retries=1).info is None


def test_an_older_one_runs_beside_newer_ones_if_there_is_room(app):
    """With a limit of two nobody has to end for it."""
    options = {"lock_limit": 2, **CANCEL}
    with held(app, "k", "2", **options):
        deliver(declare(app, **options), notes={"sent": us() - 1000})
    assert app.AsyncResult("1").state == "SUCCESS"


def test_an_outage_in_between(app, lock_server, broker, told):
    """The lock server does not answer while the newest has come: it takes over after that."""
    task = declare(app, never, **CANCEL)
    with held(app, "k", "1", **CANCEL):
        sent = us()
        lock_server.away = True
        deliver(task, "2", headers={})
        lock_server.away = False
        assert told == []
        deliver(task, "2", headers=broker.last.headers)
        assert [about["task_id"] for (_, about), _ in told] == ["1"]
        assert sent <= broker.last.notes["sent"] <= sent + 1000


def cancelled_body(task_of, lock_server, end):
    """Make a body for which a newer task comes; it *ends* when it was told."""

    def body(*_self):
        deliver(task_of(), task_id="2", headers={})
        lock_server.advance(10)
        lease = current_lease()
        assert lease.superseded == "2"
        end(*_self)

    return body


@pytest.mark.parametrize(
    ("end", "ends"),
    [
        (lambda self: self.lease.ensure_held(), "REVOKED"),
        (lambda self: self.retry(countdown=1), "REVOKED"),
        (lambda _self: "done", "SUCCESS"),
    ],
    ids=["asks", "retries", "returns"],
)
@pytest.mark.parametrize("kept", [True, False])
def test_how_the_one_that_ran_ends(app, lock_server, broker, told, end, ends, kept):
    """REVOKED, with who came, and no retry; the newest has its turn, whatever failures keep."""
    options = {"bind": True, "lock_on_cancel": "warn", "release_on_failure": kept, **CANCEL}
    task = declare(app, cancelled_body(lambda: task, lock_server, end), **options)
    before = len(broker.sent)
    deliver(task, headers={})
    result = app.AsyncResult("1")
    assert result.state == ends
    assert ends == "SUCCESS" or str(result.result).endswith("replaces it: task 2")
    assert [one.headers["id"] for one in broker.sent[before:]] == ["2"]
    [((command, about), how)] = told
    assert (command, about) == ("dislock_look", {"task_id": "1"})
    assert how["destination"] == [task.lock_for().holders()[0].worker or how["destination"][0]]


def test_a_broker_that_does_not_take_the_command(app, lock_server, caplog, monkeypatch):
    """The newcomer is parked all the same; a renewal tells."""

    def fail(*_args, **_how):
        raise ConnectionError("away")

    monkeypatch.setattr(Mailbox, "_publish", fail)
    caplog.set_level("INFO", "celery_dislock")
    options = {"bind": True, "lock_on_cancel": "warn", **CANCEL}
    end = lambda self: self.lease.ensure_held()  # noqa: E731
    task = declare(app, cancelled_body(lambda: task, lock_server, end), **options)
    deliver(task, headers={})
    assert app.AsyncResult("1").state == "REVOKED"
    assert (
        "Task shop.t[1] cancelled: a newer message of key 'k' replaces it: task 2." in caplog.text
    )
    assert "hears at its next renewal that task 1 is cancelled: away" in caplog.text


@pytest.mark.parametrize("holder", [{}, {"id": 5, "worker": "w"}, {"id": "1", "worker": None}])
def test_a_holder_that_no_worker_has_is_told_nothing(app, told, holder):
    """A thread, or a record that somebody has written by hand."""
    cancelling.tell_workers(app, [holder])
    assert told == []


@pytest.mark.parametrize(("pid", "asked", "gets"), [(7, "1", [7]), (7, "2", []), (0, "1", [])])
def test_a_worker_that_is_told_to_look(app, monkeypatch, pid, asked, gets):
    """It signals the pool process that runs the task, and nobody else; again a moment later."""
    signals, later = [], []
    monkeypatch.setattr(os, "kill", lambda *args: signals.append(args))
    request = SimpleNamespace(id="1", worker_pid=pid or os.getpid())
    monkeypatch.setattr(state, "active_requests", [request])
    timer = SimpleNamespace(call_after=lambda _seconds, call, args: later.append((call, args)))
    control = SimpleNamespace(app=app, consumer=SimpleNamespace(timer=timer))
    cancelled.renew_if_superseded(control, task_id=asked)
    assert signals == [(one, signal.SIGURG) for one in gets]
    for call, args in later:
        call(*args)
    assert signals == 2 * [(one, signal.SIGURG) for one in gets]


def test_a_process_that_dies_under_several_keys(app, lock_server, caplog, monkeypatch):
    """Each lock is asked whether a newer task waits; none does, and nothing is said."""
    monkeypatch.setattr(recovery, "is_alive", lambda _pid: False)
    task = declare(app, never, lock_key=["k", "l"], lock_on_cancel="raise")
    request = arrived(task)
    request.worker_pid = os.getpid() + 1
    error = WorkerLostError("killed")
    request.on_failure(SimpleNamespace(exception=error, exc_info=None, traceback=""))
    assert "was cancelled" not in caplog.text
    assert app.AsyncResult("1").state == "FAILURE"


def test_a_worker_without_locks_looks_for_nothing(app):
    """It has none, and asks for no lock server."""
    app.conf.dislock_enabled = False
    cancelled.renew_if_superseded(SimpleNamespace(app=app), task_id="1")


@pytest.mark.parametrize(
    "error", [Ignore(), ValueError(), SystemExit()], ids=["ignore", "own", "exit"]
)
def test_what_does_not_come_of_it(error):
    """What a body raises for reasons of its own stays what it is."""
    lease = SimpleNamespace(told_at=1.0)
    assert not cancelling.was_cancelled(lease, error)
    error.__context__ = SupersededError("k", "2")  # raised while that was handled
    assert cancelling.was_cancelled(lease, error) is not isinstance(error, Ignore)
    assert not cancelling.was_cancelled(SimpleNamespace(told_at=None), SupersededError("k", "2"))


URLS = {"dislock_url": [f"redis://{n}:1/0" for n in range(3)]}


@pytest.mark.parametrize(
    ("options", "conf", "named"),
    [
        ({"lock_expire": 5}, {}, "a renewal tells"),
        ({"lock_hold_on_retry": True}, {}, "a retry comes back"),
        ({"lock_key": ["a", "b"]}, {}, "give one key"),
        ({"lock_unique_until": "start", "lock_on_duplicate": "replace"}, {}, "which one counts"),
        ({"lock_unique_until": "end", "lock_on_duplicate": "sooner"}, {}, "which one counts"),
        ({}, URLS, "keep no line"),
        ({"lock_queue_limit": 5}, {}, "no effect"),
        ({"lock_on_cancel": "stop"}, {}, "'warn', 'raise', 'terminate'"),
        ({"lock_on_conflict": "skip", "lock_cancel_after": 5}, {}, "without lock_on_conflict"),
    ],
)
def test_what_cannot_be_used_with_it(options, conf, named):
    """It is refused when the task is bound, with what to do instead."""
    with pytest.raises(SettingsError, match=named):
        task_options("t", {"lock_key": "k", **CANCEL, **options}, conf)


@pytest.mark.parametrize("conf", [{}, {"dislock_queue_limit": 5, "dislock_queue_overflow": "skip"}])
def test_it_is_a_line_of_one_with_replacement(conf):
    """Whatever an app says of its other lines."""
    conf = {"dislock_on_conflict": "cancel", **conf}
    options = task_options("t", {"lock_key": "k"}, conf)
    assert (options.lock_queue_limit, options.lock_queue_overflow) == (1, "replace")


def test_a_callable_cannot_choose_it(app):
    """The messages of its task do not say when they were sent."""
    task = declare(app, never, lock_on_conflict=lambda *_: "cancel")
    with held(app, "k", "holder"):
        assert isinstance(deliver(task).retval.exception, SettingsError)
