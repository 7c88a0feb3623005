"""Uniqueness when sending: what goes to the broker, and what callers get; on a real Redis."""

from __future__ import annotations

import json
import pickle
import threading
from secrets import token_hex

import pytest
from celery import Celery
from celery.app.task import Context

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError, StoreError
from celery_dislock.keys.names import reserved_name
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.reservations import Reservation, Reservations, Taken
from celery_dislock.servers.store import Store
from celery_dislock.tasks.sending import PUBLISH_FOR, tell
from tests.unit.deliveries import deliver

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


class TestReservations:
    @pytest.fixture
    def reservations(self, app, client):
        client.ping()
        return runtime_of(app).process.store.reservations

    def reserve(self, reservations, encoded_id, *, ttl=HOUR, replaces=False, again=None):
        wanted = again or Reservation(LOCK, encoded_id)
        found = reservations.reserve(
            wanted._replace(ttl=ttl), token_hex(8), replaces=replaces, again=again is not None
        )
        if isinstance(found, Taken):
            return found
        return wanted._replace(ttl=HOUR, mark=found.mark, number=found.number)

    def send(self, reservations, encoded_id, *, replaces=True):
        reserved = self.reserve(reservations, encoded_id, replaces=replaces)
        reservations.confirm(reserved)
        return reserved

    def begin(self, reservations, reserved, until="start"):
        reservations.begin(reserved._replace(until=until, ttl=60.0))

    def test_one_has_it(self, reservations):
        """The second is told whose it is, and whether that one's message was sent."""
        first = self.reserve(reservations, "a")
        assert self.reserve(reservations, "b") == Taken("a", is_sent=False)
        assert reservations.confirm(first)
        assert self.reserve(reservations, "b") == Taken("a", is_sent=True)
        assert self.reserve(reservations, "a") == Taken("a", is_sent=True)
        assert isinstance(self.reserve(reservations, "a", again=first), Reservation)

    @pytest.mark.parametrize("task_id", ["a b", "a,b", "a~b", "a@b", "a%2Cb", "ä\n", "{a}"])
    def test_any_id_is_compared_as_a_whole(self, reservations, task_id):
        """Ids come from users, and may contain what separates a reservation's parts."""
        encoded_id = reserved_name(task_id)
        reserved = self.reserve(reservations, encoded_id)
        assert self.reserve(reservations, "other") == Taken(encoded_id, is_sent=False)
        assert reservations.end(reserved)

    def test_nobody_ends_what_another_has(self, reservations, client):
        """Compared by id: neither ended nor kept longer."""
        self.reserve(reservations, "a", ttl=PUBLISH_FOR)
        other = Reservation(LOCK, "b", ttl=HOUR)
        assert not reservations.end(other)
        assert not reservations.confirm(other)
        assert reserved_for(client) == "a"
        assert client.ttl(f"{LOCK}:unique") <= PUBLISH_FOR

    def test_one_that_runs_is_not_ended_as_one_that_waits(self, reservations, client):
        """A revoke does not stop a task that runs: its key stays reserved for it."""
        reserved = self.send(reservations, "a")
        self.begin(reservations, reserved, "end")
        assert not reservations.end_waiting(reserved)
        assert reserved_for(client) == "a"
        assert reservations.end(reserved)

    def test_without_messages_that_replace_others_nothing_is_left(self, reservations, client):
        """There are no numbers to keep."""
        reservations.end(self.send(reservations, "a", replaces=False))
        assert not client.keys("*")

    def test_what_is_not_sent_replaces_nothing(self, reservations, client):
        """A sender that dies between reserving and publishing costs no message."""
        first = self.send(reservations, "a")
        self.reserve(reservations, "b", replaces=True)
        self.begin(reservations, first)


class TestSending:
    def test_the_second_gets_the_result_of_the_first(self, app, client):
        """One message; the same id; and the caller can tell."""
        edit = declare(app)
        first, second = edit.delay(1), edit.delay(1)
        assert (first.duplicate, second.duplicate) == (False, True)
        assert second.id == first.id
        assert messages(client) == 1
        assert reserved_for(client) == first.id
        assert edit.delay(2).duplicate is False

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
        ids=[
            "delay",
            "apply_async",
            "signature",
            "immutable",
            "by name",
            "positional",
            "of a name",
        ],
    )
    def test_every_way_to_send_is_one(self, app, client, send):
        """There is no way around it, and arguments are bound as in a call."""
        edit = declare(app)
        first = edit.delay(1)
        again = send(app, edit)
        assert (again.id, again.duplicate) == (first.id, True)
        assert messages(client) == 1

    def test_it_can_be_an_error(self, app, client):
        """DuplicateTaskError has the key and the id, and can be pickled."""
        edit = declare(app, lock_on_duplicate="raise")
        first = edit.delay(1)
        with pytest.raises(DuplicateTaskError, match=first.id) as refused:
            edit.delay(1)
        copy = pickle.loads(pickle.dumps(refused.value))
        assert (copy.key, copy.id) == ("edit:1", first.id)
        assert messages(client) == 1

    @pytest.mark.parametrize(
        "more",
        [
            lambda edit: {"link": edit.si(2)},
            lambda edit: {"link_error": edit.si(2)},
            lambda edit: {"chain": [edit.si(2)]},
            lambda _: {"chain": []},
            lambda _: {"group_id": "g"},
            lambda edit: {"chord": edit.si(2)},
        ],
        ids=["link", "link_error", "chain", "last step", "group", "chord"],
    )
    def test_what_belongs_to_more_is_sent(self, app, client, more):
        """A dropped message would lose the rest of the work; nor does it reserve the key."""
        edit = declare(app)
        edit.delay(1)
        sent = edit.apply_async((1,), **more(edit))
        assert messages(client) == 2
        assert reserved_for(client) != sent.id

    def test_a_retry_is_sent(self, app, client):
        """The same id passes, also if the key is reserved for another by now."""
        edit = declare(app, lock_on_duplicate="replace")
        first = edit.delay(1)
        edit.apply_async((1,), task_id=first.id, retries=1)
        assert reserved_for(client) == first.id
        newest = edit.delay(1)
        edit.apply_async((1,), task_id=first.id, retries=2)
        assert messages(client) == 4
        assert reserved_for(client) == newest.id

    def test_what_is_not_published_is_not_reserved(self, app, client, monkeypatch):
        """The error is the caller's, and the key is free at once."""
        edit = declare(app)
        monkeypatch.setattr(app.amqp, "send_task_message", lambda *_, **__: 1 / 0)
        app.amqp.__dict__.pop("_send_task_message", None)
        with pytest.raises(ZeroDivisionError):
            edit.delay(1)
        assert reserved_for(client) is None

    def test_many_threads_send_one_message(self, app, client):
        """All get the same id, also while the first is publishing."""
        edit = declare(app)
        edit.app.finalize()
        results, start = [], threading.Barrier(20)

        def send():
            start.wait()
            results.append(edit.delay(1))

        threads = [threading.Thread(target=send) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len({result.id for result in results}) == 1
        assert sorted(result.duplicate for result in results) == [False] + [True] * 19
        assert messages(client) == 1

    def test_a_sender_that_died_is_not_waited_for_long(self, app, client):
        """Its key is reserved for seconds; meanwhile messages are sent without a reservation."""
        edit = declare(app)
        wanted = Reservation(LOCK, "dead", ttl=PUBLISH_FOR)
        runtime_of(app).process.store.reservations.reserve(wanted, "nonce")
        sent = edit.delay(1)
        assert messages(client) == 1
        assert sent.id != "dead"

    @pytest.mark.parametrize("until", ["start", "end", "expiry"])
    def test_a_message_that_ends_unrun_frees_its_key_unless_that_has_an_expiry(
        self, app, client, until
    ):
        """Revoked, skipped or killed: with "expiry" it is one per lock_unique_for all the same."""
        edit = declare(app, lock_unique_until=until)
        sent = edit.delay(1)
        request = Context(id=sent.id, task="unique.edit", headers={"dislock_unique": [LOCK, until]})
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
        header = json.loads(client.lindex("celery", 0))["headers"]["dislock_unique"]
        away = pytest.MonkeyPatch()
        away.setattr(Store, "acquire", fail)
        away.setattr(Reservations, "begin", fail)
        try:
            deliver(edit, sent.id, 1, headers={"dislock_unique": header})
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
        deliver(edit, sent.id, 1, headers={"dislock_unique": [LOCK, "end"]})
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
        header = json.loads(client.lindex("celery", 0))["headers"]["dislock_unique"]
        store = runtime_of(app).process.store
        store.acquire([LOCK], "another", 60.0, '{"id": "another"}')
        deliver(edit, sent.id, 1, headers={"dislock_unique": header})
        kept = goes_on or until == "expiry"
        assert reserved_for(client, header[0]) == (sent.id if kept else None)
        assert messages(client) == 1 + goes_on
        assert edit.delay(1).duplicate is kept
        if kept:
            assert client.ttl(f"{header[0]}:unique") > HOUR - 60


class TestAway:
    @pytest.fixture
    def app(self, redis_url):
        app = Celery("away", broker=redis_url, set_as_current=False)
        app.conf.dislock_url = "redis://127.0.0.1:1/0"
        with Dislock(app):
            yield app
        app.close()

    def test_messages_are_sent_all_the_same(self, app, client, caplog):
        """Without reservations, with one warning per outage."""
        edit = declare(app)
        for _ in range(5):
            assert edit.delay(1).id
        assert messages(client) == 5
        assert caplog.text.count("sent without reservations") == 1
