"""
What docs/explanation/compared.md says of other libraries, shown with the libraries themselves.

A peer that is not installed skips its tests.  Each test starts from what a user of that library
writes, and looks at what is in Redis afterwards.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import Celery, chord
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Task

ONCE = "celery_once:QueueOnce"
SINGLETON = "celery_singleton:Singleton"
LIMIT = 30.0  # seconds for what takes milliseconds
POLL = 0.01  # seconds between two looks
EXPIRY = 3600  # seconds: celery-once's default
PREFIXES = ("qo_", "SINGLETONLOCK_")  # of the names of locks
QUEUE = "celery"
KEY = "export:7"

both = pytest.mark.parametrize("base", [ONCE, SINGLETON], indirect=True)

pytestmark = [
    # celery-once has `\*` in a docstring: a warning when it is compiled, of a kind and with words
    # that depend on the version of Python.
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:SyntaxWarning"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    """An app that both libraries can use: broker and locks on one server, results in memory."""
    with Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False) as app:
        settings = {"url": redis_url, "default_timeout": EXPIRY}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        yield app


@pytest.fixture
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Task]:
    """The base class of a library, by ``module:name``; its tests are skipped without it."""
    module, name = request.param.split(":")
    peer = pytest.importorskip(module)
    if module == "celery_once":  # it keeps the first client that it makes for ever
        monkeypatch.setattr("celery_once.backends.redis.redis", None)
    return getattr(peer, name)


@pytest.fixture
def task(app: Celery, base: type[Task]) -> Callable[..., Task]:
    """Declare the task of a test; a duplicate is dropped without an exception."""

    def declare(body: Callable[..., Any], **options: Any) -> Task:
        if base.__module__.startswith("celery_once"):
            options["once"] = {"graceful": True}
        return app.task(base=base, shared=False, **options)(body)

    return declare


@contextmanager
def worker(app: Celery, **options: Any) -> Iterator[None]:
    """Run a worker in a thread; at the end it finishes what it has begun."""

    def leave_alone(**_: Any) -> None:
        """Set up no logging: Celery would take the handlers of the tests away."""

    # Else it hears up to a second later that it may stop.
    app.conf.broker_transport_options = {"polling_interval": 0.05}
    setup_logging.connect(leave_alone)
    try:
        with start_worker(app, perform_ping_check=False, **({"pool": "solo"} | options)):
            yield
    finally:
        setup_logging.disconnect(leave_alone)


def wait_for(condition: Callable[[], bool]) -> None:
    """Look again and again, until the condition is met."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(POLL)


def locks(client: redis.Redis) -> list[str]:
    """Return the names of the peers' locks that are taken."""
    return [key for key in client.keys("*") if key.startswith(PREFIXES)]


def export(corp_id: int) -> int:
    return corp_id


def report(exported: list[int]) -> list[int]:
    return exported


class TestAtSending:
    @pytest.mark.parametrize(
        ("base", "messages"),
        [(ONCE, 1), (SINGLETON, 1), ("celery_dislock:SingletonTask", 2)],
        indirect=["base"],
    )
    def test_the_peers_do_not_send_a_duplicate(self, base, task, redis_client, messages):
        """Of two equal tasks celery-once and celery-singleton send one, and celery-dislock both."""
        exports = task(export)
        exports.delay(7)
        exports.delay(7)
        assert redis_client.llen(QUEUE) == messages

    @pytest.mark.parametrize(
        ("base", "expiry"), [(ONCE, EXPIRY), (SINGLETON, -1)], indirect=["base"]
    )
    def test_the_expiry_counts_from_the_sending(self, task, redis_client, expiry):
        """With no worker yet, celery-once's lock has an hour to go, celery-singleton's no end."""
        task(export).delay(7)
        (lock,) = locks(redis_client)
        assert expiry - LIMIT < redis_client.ttl(lock) <= expiry

    @pytest.mark.parametrize(("base", "left"), [(ONCE, 1), (SINGLETON, 0)], indirect=["base"])
    def test_the_lock_of_a_message_that_was_never_sent(self, app, task, redis_client, left):
        """When publishing fails, celery-singleton gives its lock back, and celery-once keeps it."""
        app.conf.broker_url = "redis://127.0.0.1:1/0"  # nothing listens there
        app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0}
        with pytest.raises(OperationalError):
            task(export).apply_async((7,), retry=False)
        assert len(locks(redis_client)) == left

    @both
    def test_a_chord_with_two_equal_members_never_ends(self, app, task, redis_client):
        """One member is sent, the chord counts two, and its body is never called."""
        member = task(export)
        result = chord([member.si(7), member.si(7)])(app.task(report, shared=False).s())
        with worker(app):
            wait_for(lambda: not locks(redis_client))  # the member that was sent has ended
        assert redis_client.llen(QUEUE) == 0
        assert not result.ready()


class TestInTheWorker:
    @both
    def test_a_revoked_task_leaves_its_lock(self, app, task, redis_client):
        """A task that is revoked before it runs ends as REVOKED, and its lock stays taken."""
        result = task(export).delay(7)
        state.revoked.add(result.id)
        try:
            with worker(app):
                wait_for(lambda: result.state == "REVOKED")
        finally:
            state.revoked.discard(result.id)
        assert len(locks(redis_client)) == 1

    @both
    def test_a_task_that_ends_frees_the_lock_of_another(self, app, task, redis_client):
        """After an expiry, the end of the first task deletes the lock that is the second's."""
        taken = []

        def body(corp_id):
            taken.append(len(locks(redis_client)))

        exports = task(body)
        exports.delay(7)
        redis_client.delete(*locks(redis_client))  # as its expiry does
        second = exports.delay(7)
        with worker(app):
            second.get(timeout=LIMIT)
        assert taken == [1, 0]  # as seen by the first, and by the second

    @both
    def test_a_redelivery_runs_beside_the_first(self, app, task, redis_client):
        """Two deliveries of one message run at the same time, although the lock is taken."""
        meeting = threading.Barrier(2, timeout=LIMIT)

        def body(corp_id):
            meeting.wait()

        result = task(body).delay(7)
        (message,) = redis_client.lrange(QUEUE, 0, -1)
        redis_client.rpush(QUEUE, message)
        with worker(app, pool="threads", concurrency=2):
            result.get(timeout=2 * LIMIT)
        assert not meeting.broken

    @pytest.mark.parametrize("base", [SINGLETON], indirect=True)
    def test_a_retry_meets_its_own_lock(self, app, task, redis_client):
        """A retry of celery-singleton's is not sent: the task never ends, and the lock stays."""
        runs = []

        def body(self, corp_id):
            runs.append(self.request.retries)
            if len(runs) == 1:
                raise self.retry(countdown=0)

        result = task(body, bind=True).delay(7)
        with worker(app):
            wait_for(lambda: result.state == "RETRY")
        assert runs == [0]
        assert redis_client.llen(QUEUE) == 0
        assert len(locks(redis_client)) == 1


class LosesReplies(redis.Redis):
    """A client that gets no reply to its first command of one kind, although it was carried out."""

    lost: str | None = None

    def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:
        answer = super().parse_response(connection, command_name, **options)
        if command_name == self.lost:
            self.lost = None
            connection.disconnect()
            msg = "the reply was lost"
            raise redis.ConnectionError(msg)
        return answer


class TestRedisPy:
    def test_a_lost_reply_hides_its_own_lock(self, redis_url, redis_client):
        """A client that sends SET NX again then takes its own lock for somebody else's."""
        again = {"retry": Retry(NoBackoff(), 1), "retry_on_error": [redis.ConnectionError]}
        with LosesReplies.from_url(redis_url, **again) as client:
            client.lost = "SET"
            assert not client.lock(KEY).acquire(blocking=False)
        assert redis_client.ttl(KEY) == -1  # taken, for ever

    def test_a_release_that_fails_cannot_be_tried_again(self, redis_url, redis_client):
        """A release that did not reach the server forgets the token: the lock has to expire."""
        with redis.Redis.from_url(redis_url) as client:
            lock = client.lock(KEY, timeout=EXPIRY)
            lock.acquire()
            with pytest.MonkeyPatch.context() as patch:

                def evalsha(*args: Any) -> None:
                    raise redis.ConnectionError

                patch.setattr(client, "evalsha", evalsha)
                with pytest.raises(redis.ConnectionError):
                    lock.release()
            with pytest.raises(LockError, match="Cannot release"):
                lock.release()
        assert redis_client.ttl(KEY) > 0

    def test_nobody_renews_it_and_only_its_owner_releases_it(self, redis_client):
        """A body that outlasts the expiry is overtaken; it cannot release the next one's lock."""
        first = redis_client.lock(KEY, timeout=0.05)
        second = redis_client.lock(KEY, timeout=EXPIRY)
        first.acquire()
        assert second.acquire(blocking_timeout=LIMIT)
        with pytest.raises(LockNotOwnedError):
            first.release()
        assert second.owned()


class TestPythonRedisLock:
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_one_failed_renewal_is_the_last(self, redis_url, redis_client):
        """The thread that renews ends at its first error, and the holder is not told."""
        peer = pytest.importorskip("redis_lock")
        with redis.Redis.from_url(redis_url) as client:
            lock = peer.Lock(client, KEY, expire=EXPIRY, auto_renewal=True)
            lock._lock_renewal_interval = POLL

            def extend(expire: int) -> None:
                raise redis.ConnectionError

            lock.extend = extend
            lock.acquire()
            lock._lock_renewal_thread.join(LIMIT)
            assert not lock._lock_renewal_thread.is_alive()
            assert lock.locked()
            lock.release()
