"""Workers of unique tasks die, and the lock server is away: no message is lost."""

from __future__ import annotations

import base64
import contextlib
import json
import time
import uuid

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.tasks import sending
from proof.proxy import Proxy
from tests.acceptance.fleet import Worker, reservation_in
from tests.acceptance.rabbitmq import own_rabbitmq
from tests.faults.unique_app import UNIQUE_FOR
from tests.holding import wait_for
from tests.integration.servers import MASTER_NAME, Watched, wait_for_replicas
from tests.redis_server import RedisServer
from tests.unit.deliveries import deliver

pytestmark = pytest.mark.faults

LIMIT = 60.0  # seconds until a condition must hold
AT_ONCE = 5.0  # seconds: far beyond the second that the first sender waits
PREFETCHED = 100


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory):
    """A RabbitMQ for this file: it delivers again at once what a dead worker has left."""
    with own_rabbitmq(tmp_path_factory.mktemp("unique") / "rabbitmq") as rabbitmq:
        yield rabbitmq


@pytest.fixture(scope="module")
def lock_server(redis_program, tmp_path_factory):
    """A server of this file alone: its workers outlive a test."""
    with RedisServer(tmp_path_factory.mktemp("unique") / "redis") as server:
        yield server


@pytest.fixture
def client(lock_server):
    """A client of that server, which is empty."""
    with lock_server.client(decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def start_worker(tmp_path):
    """Start workers of ``tests.faults.unique_app``; none outlives the test."""
    started = []

    def start(locks, broker, *options, pool="prefork", concurrency=1, **env):
        env = {"UNIQUE_LOCKS": locks, "UNIQUE_BROKER": broker, **env}
        name = f"unique-{len(started)}"
        options = ("--pool", pool, "--concurrency", str(concurrency), *options)
        started.append(Worker(tmp_path, name, *options, app="tests.faults.unique_app", env=env))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def reserved(client, lock):
    """The state and the task id of a reservation, and how long it lasts; None: the key is free."""
    record = reservation_in(client, lock)
    return record and (record.state, record.id, record.remaining)


class Senders:
    """An app whose lock server is not its broker, and what it sends."""

    def __init__(self, app, broker):
        self.broker = broker
        self._numbers = iter(range(10**6))

        @app.task(
            name="edit",
            base=SingletonTask,
            lock_key="edit:<doc>",
            lock_unique_until="start",
            shared=False,
        )
        def edit(doc): ...

        self.edit = edit

    def send(self):
        """Send a message of a new key; return the key and whether it was reserved."""
        doc = next(self._numbers)
        sent = self.edit.delay(doc)
        assert sent.duplicate is False
        message = json.loads(self.broker.lindex("celery", 0))
        assert message["headers"]["id"] == sent.id
        return "unique" in message["headers"].get("dislock", {})


@pytest.fixture
def away(own_redis_server, redis_url, redis_client):
    """Senders, and the proxy before a lock server of their own."""
    with Proxy(own_redis_server.port) as proxy:
        app = Celery("away", broker=redis_url, set_as_current=False)
        app.conf.dislock_url = proxy.url
        with contextlib.closing(app), Dislock(app):
            senders = Senders(app, redis_client)
            senders.proxy = proxy
            assert senders.send()
            yield senders
            proxy.heal()


def warnings(caplog):
    return caplog.text.count("are sent without reservations")


class TestAway:
    def test_a_server_that_is_paused(self, own_redis_server, away, caplog):
        """The first sender waits for a second; those after it do not ask.  One warning."""
        own_redis_server.pause()
        try:
            before = time.monotonic()
            assert away.send() is False
            assert time.monotonic() - before < AT_ONCE
            asked = len(away.proxy.commands)
            # The server is asked again after LEAVE_ALONE; a slow machine may get there.
            for _ in range(20):
                assert away.send() is False
            late = (time.monotonic() - before) // sending.LEAVE_ALONE
            assert len(away.proxy.commands) <= asked + 10 * late
            assert warnings(caplog) == 1
        finally:
            own_redis_server.resume()
        wait_for(lambda: time.sleep(0.2) or away.send(), "reservations", LIMIT)
        assert warnings(caplog) == 1

    @pytest.mark.parametrize(
        "commands",
        [
            [("REPLICAOF", "127.0.0.1", "1")],
            [("CONFIG", "SET", "maxmemory", "1")],
            [("ACL", "SETUSER", "default", "resetkeys", "~other:*")],
        ],
        ids=["READONLY", "OOM", "NOPERM"],
    )
    def test_a_server_that_answers_errors(self, own_redis_server, away, caplog, commands):
        """As one that does not answer: all is sent, with one warning, and it is left alone."""
        with own_redis_server.client() as client:
            for command in commands:
                client.execute_command(*command)
        before = time.monotonic()
        assert away.send() is False
        assert time.monotonic() - before < AT_ONCE
        asked = len(away.proxy.commands)
        for _ in range(5):
            assert away.send() is False
        late = (time.monotonic() - before) // sending.LEAVE_ALONE
        assert len(away.proxy.commands) <= asked + 10 * late
        assert warnings(caplog) == 1


class Failing:
    """An app whose lock server is a master behind Sentinels, which is about to fail."""

    def __init__(self, watched, app, broker):
        self.ran = []
        self._watched = watched
        self._app = app
        self._broker = broker

    def declare(self, **options):
        """Declare a task that notes its editions."""

        @self._app.task(name="edit", base=SingletonTask, lock_key="edit", shared=False, **options)
        def edit(edition):
            self.ran.append(edition)

        return edit

    def cut_off(self):
        """Let the replicas hear nothing more of their master."""
        old = self._watched.master
        wait_for_replicas(old, 2)
        for server in self._watched.servers:
            if server is not old:
                server.pause()
        with old.client() as client:  # nothing is in the replicas' buffers, either
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def fail_over(self):
        """Let the master die, and a replica take its place that knows nothing since the cut."""
        old = self._watched.master
        old.kill()
        for server in self._watched.servers:
            if server is not old:
                server.resume()
        new = self._watched.wait_for_master(other_than=old)
        wait_for(lambda: set(self._watched.named()) == {new.port}, "all Sentinels name the next")

    def reserved(self):
        """The reservation of the key; see the function of this name."""
        with self._watched.master.client(decode_responses=True) as client:
            return reserved(client, "dislock:{edit}")

    def reserved_for(self):
        """The id of the task that the key is reserved for; None: it is free."""
        found = self.reserved()
        return found and found[1]

    def left(self):
        """All keys of ours on the master."""
        with self._watched.master.client(decode_responses=True) as client:
            return client.keys("dislock*")

    def run_one(self, task):
        """Run the task of the first message in the queue."""
        message = json.loads(self._broker.rpop("celery"))
        args, *_ = json.loads(base64.b64decode(message["body"]))
        header = {"dislock": message["headers"]["dislock"]}
        deliver(task, message["headers"]["id"], *args, headers=header)


class TestFailovers:
    """The replica that takes over does not know what the master was told last."""

    @pytest.fixture
    def failing(self, redis_program, redis_url, redis_client, tmp_path):
        with Watched(tmp_path) as watched:
            app = Celery("failing", broker=redis_url, set_as_current=False)
            app.conf.dislock_url = watched.url
            app.conf.dislock_transport_options = {"master_name": MASTER_NAME}
            with contextlib.closing(app), Dislock(app):
                yield Failing(watched, app, redis_client)

    def test_a_failover_that_loses_a_reservation(self, failing):
        """Two messages are sent, and both run; the first ends nothing of the second's."""
        edit = failing.declare(lock_unique_until="end")
        failing.cut_off()
        first = edit.delay(1)
        assert failing.reserved_for() == first.id
        failing.fail_over()
        assert failing.reserved_for() is None
        second = edit.delay(2)
        assert (second.duplicate, failing.reserved_for()) == (False, second.id)
        failing.run_one(edit)
        assert (failing.ran, failing.reserved_for()) == ([1], second.id)
        failing.run_one(edit)
        assert failing.ran == [1, 2]
        assert failing.left() == []

    def test_a_failover_that_loses_a_replacement(self, failing):
        """The older message does not learn that it was replaced: it runs as well, and first."""
        edit = failing.declare(lock_unique_until="start", lock_on_duplicate="replace")
        first = edit.delay(1)
        failing.cut_off()
        second = edit.delay(2)
        assert failing.reserved_for() == second.id
        failing.fail_over()
        assert failing.reserved_for() == first.id
        for _ in range(2):
            failing.run_one(edit)
        assert failing.ran == [1, 2]
        assert failing.reserved_for() is None

    def test_a_failover_that_loses_an_end(self, failing):
        """The key stays reserved for a task that is over, as after a purge: for lock_unique_for."""
        edit = failing.declare(lock_unique_until="end", lock_unique_for=UNIQUE_FOR)
        first = edit.delay(1)
        failing.cut_off()
        failing.run_one(edit)
        assert failing.reserved_for() is None
        failing.fail_over()
        again = edit.delay(2)
        assert (again.id, again.duplicate) == (first.id, True)
        _, _, seconds = failing.reserved()
        assert 0 <= seconds <= UNIQUE_FOR


@contextlib.contextmanager
def declared(broker, lock_server):
    """The task of tests.faults.unique_app, in an app of a sender's own."""
    app = Celery("sender", broker=broker, set_as_current=False)
    app.conf.dislock_url = lock_server.url
    with contextlib.closing(app):

        @app.task(
            name="edit",
            base=SingletonTask,
            lock_key="edit:<doc>",
            lock_unique_until="end",
            lock_unique_for=UNIQUE_FOR,
            ignore_result=True,
            shared=False,
        )
        def edit(doc): ...

        yield edit


class TestWorkers:
    def test_no_lock_server_where_locks_are_off(self, client, lock_server, start_worker):
        """What was reserved runs, though nobody can be told that it does."""
        with Proxy(lock_server.port) as proxy:
            with declared(lock_server.url, lock_server) as edit:
                for number in range(3):
                    edit.delay(number)
            client.set("gate", 1)
            proxy.black_hole()
            worker = start_worker(
                proxy.url, lock_server.url, "--no-dislock", UNIQUE_NOTES=lock_server.url
            )
            wait_for(lambda: client.llen("ran") == 3, "three runs", LIMIT)
            assert reserved(client, "dislock:{edit:1}")[0] == "waiting"
            worker.kill()

    def test_a_worker_that_dies_with_many_messages(
        self, client, lock_server, rabbitmq, start_worker
    ):
        """The broker delivers them to another, where all run; their keys are free after that."""
        broker = rabbitmq.add_virtual_host(f"unique-{uuid.uuid4().hex[:8]}")
        with declared(broker, lock_server) as edit:
            doomed = start_worker(lock_server.url, broker)
            sent = [edit.delay(number) for number in range(PREFETCHED)]
            wait_for(lambda: client.llen("ran") == 1, "one that runs", LIMIT)
            wait_for(lambda: doomed.log.count(" received") == PREFETCHED, "the others", LIMIT)
            doomed.kill()
            again = [edit.delay(number) for number in range(1, PREFETCHED)]
            assert [result.id for result in again] == [result.id for result in sent[1:]]
        client.set("gate", 1)
        start_worker(lock_server.url, broker)
        expected = {f"edit:{number}" for number in range(PREFETCHED)}
        wait_for(lambda: set(client.lrange("ran", 0, -1)) == expected, "all runs", LIMIT)
        wait_for(lambda: not client.keys("*:unique"), "all keys are free", UNIQUE_FOR)
        assert client.llen("ran") == PREFETCHED + 1
