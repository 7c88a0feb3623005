"""What decides about messages is wrapped for every app: sending them, and revoking them."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime, timezone
from types import SimpleNamespace
from unittest.mock import MagicMock as Mock

import pytest
from celery import Celery
from celery.worker.control import Panel
from celery.worker.request import Request

from celery_dislock import SingletonTask, hooks
from celery_dislock.plugin import LockStep  # noqa: F401 -- as a worker does
from tests.unit.deliveries import Broker, deliver, noted
from tests.unit.fakes import FakeRecord

LOCK = "dislock:{edit:1}"


@pytest.fixture
def broker(app, monkeypatch):
    """What the app publishes; revokes go nowhere."""
    broker = Broker()
    monkeypatch.setattr(app.amqp, "send_task_message", broker.receive)
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: "broadcast")
    return broker


@pytest.fixture
def there(world):
    return world.store.reservations


def declare(app, name="edit", **options):
    options = {"lock_key": "edit:<doc>", "lock_unique_until": "end", **options}

    @app.task(name=name, base=SingletonTask, shared=False, **options)
    def edit(doc): ...

    return edit


# Sending


def test_a_task_is_found_by_its_name_before_it_is_made(app, broker, there):
    """Celery makes the tasks of ``@app.task`` at their first use."""
    declare(app)
    assert "edit" not in app._tasks
    app.send_task("edit", (1,))
    assert there.of(LOCK).state == "waiting"


def test_a_name_that_this_process_does_not_know_is_sent_as_it_is(app, broker, there):
    """Its options are known to the workers alone."""
    app.finalize()
    result = app.send_task("unknown", (1,))
    assert [sent["name"] for sent in broker.sent] == ["unknown"]
    assert there.asked == []
    assert result.duplicate is False


def test_an_app_that_must_not_be_finalized_is_not(broker):
    """Celery would raise an error."""
    app = Celery("x", set_as_current=False, autofinalize=False, broker="memory://")
    app.task(lambda: None, name="edit", lock_key="k", shared=False)
    assert hooks._task_named(app, "edit") is None
    assert not app.finalized


def test_positional_arguments_of_send_task_are_what_they_were(app, broker, there):
    """A countdown, an ETA and an id: for unique tasks, and for all others."""
    declare(app)

    @app.task(name="plain")
    def plain(doc): ...

    for name in ("edit", "plain"):
        app.send_task(name, (1,), {}, 100, None, f"id of {name}")
    app.send_task("plain", (1,), {}, None, datetime(2030, 1, 2, tzinfo=timezone.utc))
    assert [sent["task_id"] for sent in broker.sent[:2]] == ["id of edit", "id of plain"]
    assert all(sent["eta"] for sent in broker.sent)
    assert broker.sent[2]["eta"].startswith("2030-01-02")
    assert there.asked[1][1].ttl == pytest.approx(3700)


def test_a_sender_without_a_lock_server_sends_all_the_same(monkeypatch, caplog):
    """Its workers may be told theirs on the command line.  The log says so once."""
    app = Celery("away", broker="amqp://nobody", set_as_current=False)
    app.conf.dislock_metrics = True
    sent = []
    monkeypatch.setattr(hooks.Celery, "producer_or_acquire", lambda *_: nullcontext(Mock()))
    monkeypatch.setattr(app.amqp, "send_task_message", lambda *_, **options: sent.append(options))
    task = declare(app)
    assert [task.delay(1).duplicate for _ in range(2)] == [False, False]
    assert len(sent) == 2
    [message] = caplog.messages
    assert message.startswith("Messages of unique tasks are sent without reservations: ")


@pytest.mark.parametrize(("off", "until"), [(True, "end"), (False, None)])
def test_what_is_off_or_not_unique_reserves_nothing(app, broker, there, off, until):
    """Its result can be asked all the same whether it is another's."""
    app.conf.dislock_enabled = False if off else None
    task = declare(app, lock_unique_until=until)
    assert [task.delay(1).duplicate for _ in range(2)] == [False, False]
    assert there.asked == []


def test_a_retry_of_a_body_is_sent_under_its_reservation(app, broker, there):
    """It keeps the mark and the number of its message, and is held back until the lock is free."""

    @app.task(
        name="edit",
        base=SingletonTask,
        lock_key="edit:<doc>",
        lock_unique_until="end",
        lock_on_duplicate="replace",
        bind=True,
    )
    def edit(self, doc):
        raise self.retry(countdown=5)

    sent_id = edit.delay(1).id
    header = broker.sent[0]["notes"]["unique"]
    deliver(edit, sent_id, 1, notes={"unique": header})
    assert [sent["notes"]["unique"] for sent in broker.sent] == [header, header]
    assert [sent["task_id"] for sent in broker.sent] == [sent_id, sent_id]
    assert there.of(LOCK).id == sent_id


def test_a_task_that_another_thread_is_making_is_waited_for(app, monkeypatch):
    """Celery registers it before it is bound: it would be sent unguarded."""

    class Edit(SingletonTask):
        name = "edit"
        lock_key = "k"
        lock_unique_until = "end"

        def run(self): ...

    task = Edit()
    naps = []

    def another_thread(_seconds):
        naps.append(1)
        if len(naps) == 3:
            Edit.bind(app)

    monkeypatch.setattr(hooks.time, "sleep", another_thread)
    assert hooks.guard_for_sending(task, app) is Edit.dislock_guard
    assert len(naps) == 3


# Revoking


@pytest.mark.parametrize("by", ["result", "list", "nothing"])
def test_a_revoke_names_its_tasks_in_several_ways(app, broker, there, by):
    """A result does it itself; a list is one message to all workers."""
    first = declare(app).delay(1)
    if by == "result":
        first.revoke()
    else:
        app.control.revoke([first.id, "other"] if by == "list" else [])
    assert (there.of(LOCK) is None) == (by != "nothing")


@pytest.fixture
def worker(app, monkeypatch):
    """A worker's tasks, and its command to revoke one."""
    timer = SimpleNamespace(schedule=SimpleNamespace(queue=[]))
    told = SimpleNamespace(reserved_requests=[], active_requests=[], app=app)
    told.consumer = SimpleNamespace(timer=timer)
    monkeypatch.setattr("celery.worker.state", told)
    told.revoke = lambda *ids: Panel.data["revoke"](told, list(ids))
    monkeypatch.setattr("celery.worker.control._revoke", lambda _state, ids, *_, **__: ids)
    return told


def received(task_id="a", header=(LOCK, "end", "ab", 3)):
    context = SimpleNamespace(id=task_id, task="edit", **noted(unique=list(header)))
    return SimpleNamespace(id=task_id, _context=context)


@pytest.mark.parametrize(
    ("ids", "runs", "freed"),
    [(["a"], False, True), (["b", "a"], False, True), (["b"], False, False), (["a"], True, False)],
)
def test_a_worker_that_is_told_frees_the_key_of_what_it_has(app, there, worker, ids, runs, freed):
    """Of a message that was prefetched, or waits for its ETA; its task may not begin for hours."""
    there.records[LOCK] = FakeRecord("ab", "waiting", "a", number=3, ends=2000.0)
    request = received()
    worker.reserved_requests = [request]
    worker.active_requests = [request] if runs else []
    assert "flagged as revoked" in worker.revoke(*ids)["ok"]
    assert (there.of(LOCK) is None) == freed
    assert len(there.asked) == freed


def test_a_worker_that_is_told_frees_the_key_of_what_its_timer_has(app, there, worker):
    """A message with an ETA is in no list of Celery's."""
    there.records[LOCK] = FakeRecord("ab", "waiting", "a", number=3, ends=2000.0)
    request = Request.__new__(Request)
    request.id, request._context = "a", received()._context
    entries = [SimpleNamespace(entry=SimpleNamespace(args=args)) for args in ((), ("b",))]
    entries.append(SimpleNamespace(entry=SimpleNamespace(args=(request, 1))))
    worker.consumer.timer.schedule.queue = entries
    worker.revoke("a")
    assert there.of(LOCK) is None


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
