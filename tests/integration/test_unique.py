"""Uniqueness when sending: what goes to the broker, and what callers get; on both servers.

In the usual app, in apps that were set up in other ways, and eagerly.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from celery import Celery, Task, shared_task
from celery.app.task import Context

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError, StoreError
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.reservations import Reservations
from celery_dislock.servers.store import Store
from celery_dislock.tasks.sending import tell
from tests.conftest import BOTH
from tests.unit.deliveries import deliver, noted

pytestmark = BOTH

LOCK = "dislock:{edit:1}"
HOUR = 3600.0


@pytest.fixture
def app(redis_url):
    app = Celery("unique", broker=redis_url, backend="cache+memory://", set_as_current=False)
    with Dislock(app):
        yield app
    app.close()


@pytest.fixture
def client(redis_client):
    return redis_client


def declare(app, name="unique.edit", **options):
    """Declare a task whose key is its first argument's."""

    @app.task(
        name=name,
        base=SingletonTask,
        lock_key="edit:<doc>",
        shared=False,
        **{"lock_unique_until": "start", **options},
    )
    def edit(doc, edition=0): ...

    return edit


def messages(client):
    """How many messages wait in the queue."""
    return client.llen("celery")


def reserved_for(client, lock=LOCK):
    """The id of the task that the key is reserved for; None if it is free."""
    record = (client.get(f"{lock}:unique") or "2 -").split(" ")
    return None if record[1] == "-" else record[4]


class TestSending:
    @pytest.mark.parametrize(
        "send",
        [
            lambda _, edit: edit.delay(1),
            lambda _, edit: edit.apply_async((), {"doc": 1}),
            lambda _, edit: edit.s(1).delay(),
            lambda _, edit: edit.si(1).apply_async(),
            lambda app, _: app.send_task("unique.edit", (1,)),
            lambda app, _: app.send_task("unique.edit", (), {"doc": "1"}, 0),
            lambda app, _: app.signature("unique.edit", (1,)).delay(),
        ],
    )
    def test_every_way_to_send_is_one(self, app, client, send):
        """There is no way around it, and arguments are bound as in a call."""
        edit = declare(app)
        first = edit.delay(1)
        again = send(app, edit)
        assert (again.id, again.duplicate) == (first.id, True)
        assert messages(client) == 1

    @pytest.mark.parametrize("until", ["start", "end", "expiry"])
    def test_a_message_that_ends_unrun_frees_its_key_unless_that_has_an_expiry(
        self, app, client, until
    ):
        """Revoked, skipped or killed: with "expiry" it is one per lock_unique_for all the same."""
        edit = declare(app, lock_unique_until=until)
        sent = edit.delay(1)
        request = Context(id=sent.id, task="unique.edit", **noted(unique=[LOCK, until]))
        tell(app, "end", request)
        assert reserved_for(client) == (sent.id if until == "expiry" else None)


class TestRunning:
    """What becomes of the reservation, where the lock server is away for a while."""

    @pytest.mark.parametrize("lock_key", ["edit:<doc>", ("edit:<doc>", "all")])
    @pytest.mark.parametrize(("until", "ends"), [("start", True), ("end", True), ("expiry", False)])
    def test_a_task_that_ran_without_its_lock_frees_its_key(
        self, app, client, lock_key, until, ends
    ):
        """Else the next messages of the key would be dropped for lock_unique_for."""

        def fail(*_args, **_kwargs):
            raise StoreError("redis://x", "away")

        ran = []
        app.conf.dislock_on_unavailable = "run"

        @app.task(
            name="unique.edit",
            base=SingletonTask,
            lock_key=lock_key,
            lock_unique_until=until,
            shared=False,
        )
        def edit(doc):
            ran.append(doc)
            away.undo()

        sent = edit.delay(1)
        header = json.loads(client.lindex("celery", 0))["headers"]["dislock"]["unique"]
        away = pytest.MonkeyPatch()
        away.setattr(Store, "acquire", fail)
        away.setattr(Reservations, "begin", fail)
        try:
            deliver(edit, sent.id, 1, notes={"unique": header})
        finally:
            away.undo()
        assert ran == [1]
        assert reserved_for(client, header[0]) == (None if ends else sent.id)
        assert edit.delay(1).duplicate is not ends


class TestGoingOn:
    """A task that goes on in another message under its own id."""

    @pytest.mark.parametrize("limit", [1, None])
    @pytest.mark.parametrize("how", ["retry", "replace"])
    def test_its_next_message_has_the_key(self, app, client, how, limit):
        """Neither the end of the body nor that of its lock ends the new reservation."""

        @app.task(
            name="unique.edit",
            bind=True,
            base=SingletonTask,
            lock_key="edit:<doc>",
            lock_limit=limit,
            lock_unique_until="end",
            shared=False,
        )
        def edit(self, doc):
            if how == "retry":
                raise self.retry(countdown=600)
            self.replace(edit.si(doc))

        sent = edit.delay(1)
        deliver(edit, sent.id, 1, notes={"unique": [LOCK, "end"]})
        assert messages(client) == 2
        assert reserved_for(client) == sent.id
        assert client.get(f"{LOCK}:unique").split(" ")[1] == "w"
        assert client.ttl(f"{LOCK}:unique") > HOUR - 60
        assert edit.delay(1).id == sent.id

    @pytest.mark.parametrize("until", ["start", "end", "expiry"])
    @pytest.mark.parametrize("lock_key", ["edit:<doc>", ("edit:<doc>", "all")])
    @pytest.mark.parametrize(
        ("strategy", "goes_on"),
        [("retry", True), ("skip", False), ("raise", False), ("reject", False), ("wait", False)],
    )
    def test_what_is_refused_by_the_lock(self, app, client, until, lock_key, strategy, goes_on):
        """A task that is put off keeps its key; one that ends without running frees it."""

        @app.task(
            name="unique.edit",
            base=SingletonTask,
            lock_key=lock_key,
            lock_on_conflict=strategy,
            lock_unique_until=until,
            shared=False,
            **({"lock_wait_timeout": 0.05} if strategy == "wait" else {}),
        )
        def edit(doc): ...

        sent = edit.delay(1)
        header = json.loads(client.lindex("celery", 0))["headers"]["dislock"]["unique"]
        store = runtime_of(app).process.store
        store.acquire([LOCK], "another", 60.0, '{"id": "another"}')
        deliver(edit, sent.id, 1, notes={"unique": header})
        kept = goes_on or until == "expiry"
        assert reserved_for(client, header[0]) == (sent.id if kept else None)
        assert messages(client) == 1 + goes_on
        assert edit.delay(1).duplicate is kept
        if kept:
            assert client.ttl(f"{header[0]}:unique") > HOUR - 60


@pytest.fixture
def make(redis_url):
    """Make apps with the plugin; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(name="stranger", *, plugin=True, **conf):
            app = Celery(name, broker=redis_url, set_as_current=False)
            app.conf.update(conf)
            if plugin:
                stack.enter_context(Dislock(app))
            stack.callback(app.close)
            return app

        yield make


class TestResults:
    @pytest.mark.parametrize(
        ("conf", "options"),
        [
            ({"task_always_eager": True}, {}),
            ({"dislock_enabled": False}, {}),
            ({"dislock_url": "redis://127.0.0.1:1/0"}, {}),
            ({}, {"link": "another"}),
            ({}, {"retries": 1, "task_id": "other"}),
        ],
        ids=["eager", "off", "away", "linked", "retried"],
    )
    def test_every_result_says_whether_it_is_a_duplicate(self, make, conf, options):
        """Else the caller's code breaks on the day on which the lock server is away."""
        edit = declare(make(**conf))
        if "link" in options:
            options = {"link": edit.si(2)}
        edit.delay(1)
        assert edit.apply_async((1,), **options).duplicate is False


class TestIds:
    @pytest.mark.parametrize("on_duplicate", ["return", "raise", "replace"])
    def test_an_id_that_is_given_to_all(self, make, client, on_duplicate):
        """Five sends with one id are one message and four duplicates, but for "replace"."""
        edit = declare(make(), lock_on_duplicate=on_duplicate)
        sent = []
        for _ in range(5):
            with contextlib.suppress(DuplicateTaskError):
                sent.append(edit.apply_async((1,), task_id="mine"))
        if on_duplicate == "replace":
            assert messages(client) == 5
            return
        assert messages(client) == 1
        duplicates = {"return": [False, True, True, True, True], "raise": [False]}[on_duplicate]
        assert [result.duplicate for result in sent] == duplicates


class TestApps:
    def test_a_shared_task(self, make, client, redis_url):
        """One function, a task of its own in each app, and each app its own keys."""
        name = f"of-all-{redis_url}"

        @shared_task(
            name=name, base=SingletonTask, lock_key="edit:<doc>", lock_unique_until="start"
        )
        def edit(doc): ...

        for prefix in ("one", "two"):
            app = make(prefix, dislock_prefix=prefix)
            task = app.tasks[name]
            assert [task.delay(1).duplicate for _ in range(2)] == [False, True]
            assert reserved_for(client, f"{prefix}:{{edit:1}}")
        assert messages(client) == 2

    def test_a_sender_without_the_plugin(self, make, client):
        """An app that knows neither the task nor the plugin sends as ever, and reserves nothing."""
        edit = declare(make())
        stranger = make("plain", plugin=False)
        for _ in range(2):
            stranger.send_task("unique.edit", (1,))
        assert messages(client) == 2
        assert reserved_for(client) is None
        assert edit.delay(1).duplicate is False
        stranger.send_task("unique.edit", (1,))
        assert messages(client) == 4

    @pytest.mark.parametrize(
        ("conf", "options"),
        [
            ({"task_annotations": {"unique.edit": {"lock_unique_until": "start"}}}, {}),
            ({"dislock_unique_until": "start"}, {}),
            ({"dislock_enabled": True}, {"base": Task, "lock_unique_until": "start"}),
            ({}, {"lock_unique_until": "end"}),
        ],
        ids=["annotation", "setting", "a plain task that is guarded", "bound"],
    )
    def test_every_way_to_declare_it(self, make, client, conf, options):
        """An annotation, a setting, any base class; the bound task is no argument of the call."""
        app = make(**conf)
        options = {"base": SingletonTask, "lock_key": "edit:<doc>", "shared": False, **options}

        @app.task(name="unique.edit", bind=True, **options)
        def edit(self, doc): ...

        assert [edit.delay(1).duplicate for _ in range(2)] == [False, True]
        assert messages(client) == 1


@pytest.fixture(params=["apply", "task_always_eager"])
def call(app, request):
    """Call a task eagerly, in each of the two ways."""

    def call(task, *args):
        app.conf.task_always_eager = request.param == "task_always_eager"
        try:
            if request.param == "apply":
                return task.apply(args)
            return task.delay(*args)
        finally:
            app.conf.task_always_eager = False

    return call


@pytest.mark.parametrize(("until", "duplicate"), [("start", False), ("end", True)])
def test_a_call_in_the_body(app, client, call, until, duplicate):
    """With "end" its own key is reserved for as long as it runs."""
    inner = []

    @app.task(
        base=SingletonTask,
        lock_key="edit:<doc>",
        lock_unique_until=until,
        lock_limit=None,
        shared=False,
    )
    def edit(doc):
        if not inner:
            inner.append(None)
            inner[0] = call(edit, doc)
        return len(inner)

    outer = call(edit, 1)
    assert outer.get() == 1
    assert inner[0].duplicate is duplicate
    assert (inner[0].id == outer.id) is duplicate
    assert reserved_for(client) is None


def test_a_message_that_is_replaced(app, client, call):
    """With "replace" the eager call is the newest: it runs, and the message ends when it comes."""
    edit = declare(app, lock_on_duplicate="replace")
    edit.delay(1)
    _, _, mark, number = json.loads(client.lindex("celery", 0))["headers"]["dislock"]["unique"]
    assert call(edit, 1).duplicate is False
    record = client.get(f"{LOCK}:unique").split(" ")
    assert record[9] == mark
    assert int(record[12]) > number


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_a_retry(app, client, call, until):
    """It runs within the first, under its id, and is no duplicate of it."""
    ran = []

    @app.task(
        bind=True, base=SingletonTask, lock_key="edit:<doc>", lock_unique_until=until, shared=False
    )
    def edit(self, doc):
        ran.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    assert call(edit, 1).get() == "done"
    assert ran == [0, 1, 2]
    assert (reserved_for(client) is None) is (until != "expiry")
