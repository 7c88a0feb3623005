"""The broker and the result backend, with a bound on each wait.

A broker may accept connections and never answer.  A RabbitMQ in alarm (its memory or its disk is
nearly full) reads nothing more from a connection that publishes, until the alarm ends.  Its clients
wait without end, and so do those of some result backends.  The caller is the event loop of a
worker, or holds a worker slot.

So what this package publishes goes by connections of its own.  Each wait on them has an end, and
after a slow failure the broker is left alone for a while.  The app's own connections stay as they
are, and nothing here waits for those of the app's pool.  What is written to a connection that
RabbitMQ has blocked is read when the alarm ends, as what Celery sends itself.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, wait
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from amqp.exceptions import ChannelError, MessageNacked
from kombu.exceptions import OperationalError
from kombu.messaging import Producer

from celery_dislock.clock import monotonic
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

T = TypeVar("T")

BROKER_WITHIN = 2.0  # seconds for the broker to connect, and for each reply
BACKEND_WITHIN = 2.0  # seconds for which an event loop waits for a result backend
# Names of that time in transport options: redis-py's, then amqp's.
TIMEOUTS = ("socket_connect_timeout", "socket_timeout", "read_timeout", "write_timeout")
SLOW = 1.0  # seconds that a failure may take whose cause answers
RESTS = 10  # times as long as a slow failure took, its cause is left alone
IDLE_MOST = 10  # connections of a process that are kept; threads and greenlets need several


class RefusedError(Exception):
    """The broker has refused a message, and says so: a queue that it would go to is full."""


def away_or_refuses(error: Exception) -> str:
    """Say why a message could not be published."""
    is_refused = isinstance(error, RefusedError)
    return f"the broker {'refuses its message' if is_refused else 'is away'}: {reason_of(error)}"


class OwnProducer(Producer):
    """
    A producer with a connection of its own to the app's broker; blocks to connect.

    Attributes:
        is_blocked: Whether RabbitMQ reads nothing from this connection at present.
        is_broken: Whether a reply is missing, so that the connection must not be used again.

    Raises:
        Exception: Any error of the broker's client.
    """

    def __init__(self, app: Celery) -> None:
        self.is_blocked = self.is_broken = self._listens = False
        given = app.connection_for_write()
        options = {**(given.transport_options or {}), **dict.fromkeys(TIMEOUTS, BROKER_WITHIN)}
        is_amqp = given.transport.driver_name == "py-amqp"
        if is_amqp:
            options |= {"on_blocked": self._blocked, "on_unblocked": self._unblocked}
        # Without heartbeats, which nobody would send while the connection is idle.
        mine = given.clone(connect_timeout=BROKER_WITHIN, heartbeat=0, transport_options=options)
        try:
            mine.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_WITHIN)
            if is_amqp:  # also what is sent, and beside greenlets
                mine.connection.sock.settimeout(BROKER_WITHIN)
            super().__init__(mine.channel())  # type: ignore[no-untyped-call]
        except mine.connection_errors as exc:
            mine.collect()
            raise OperationalError(str(exc)) from exc

    def publish(self, *args: Any, **options: Any) -> Any:
        """Publish once: kombu would try again, for ever if it is not told how often."""
        options["retry"] = False
        return super().publish(*args, **options)  # type: ignore[no-untyped-call]

    def listen(self) -> None:
        """
        Raise the error with which RabbitMQ refuses what was just published.

        RabbitMQ refuses it if the exchange is gone, or must not be written to.  It says so later,
        and closes the channel.  Otherwise what is published next would be lost, or raise that
        error.  Blocks for a round trip; not at all while the connection is blocked.
        """
        if self.is_blocked:
            return
        self._listens = True
        try:
            self.channel.basic_qos(0, 0, False)  # noqa: FBT003 -- any call that has an answer
        except _BlockedError:
            pass  # the answer comes when the alarm ends, and nobody needs it
        except (OSError, *self.connection.connection_errors):
            self.is_broken = True  # as if it broke a moment later
        finally:
            self._listens = False

    def _blocked(self, _reason: str) -> None:
        self.is_blocked = True
        if self._listens:
            raise _BlockedError

    def _unblocked(self) -> None:
        self.is_blocked = False


class _BlockedError(Exception):
    """No answer will come while the alarm lasts."""


class Rest:
    """
    Leaves something alone for a while if a failure of it was slow in coming.

    Attributes:
        until: Monotonic time until which it is left alone.
    """

    until = 0.0

    def after(self, began: float) -> None:
        """Begin, if what has just failed was slow; *began*: monotonic time at which it began."""
        now = monotonic()
        if now - began > SLOW:
            self.until = now + RESTS * (now - began)


class OwnProducers:
    """
    The producers of one process of an app, for any of its threads.

    Args:
        app: The app whose broker is published to.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._idle: deque[OwnProducer] = deque()
        self._rest = Rest()

    def send(self, publish: Callable[[Any], T]) -> T:
        """
        Publish something.  Blocks for some seconds at most; each reply has BROKER_WITHIN.

        Args:
            publish: Publishes it with the producer that it is given.  It is called a second time
                with another one if the first had a connection that was closed meanwhile.

        Returns:
            What *publish* returns.

        Raises:
            OperationalError: The broker is away.  What was being written may arrive all the same.
            RefusedError: The broker does not take this message.
            Exception: Any other error of the broker's client.
        """
        began = monotonic()
        if began < self._rest.until:
            raise OperationalError("it did not answer a moment ago, and is left alone for a while")
        try:
            if idle := self._take_idle():
                try:
                    return self._send(idle, publish)
                except (OperationalError, ChannelError):
                    if monotonic() - began > SLOW:
                        raise
            return self._send(OwnProducer(self._app), publish)
        except OperationalError:
            self._rest.after(began)
            raise

    def _send(self, producer: OwnProducer, publish: Callable[[Any], T]) -> T:
        connection, began = producer.connection, monotonic()
        try:
            sent = publish(producer)
        except BaseException as exc:
            connection.collect()  # not closed, which would wait for an answer
            if isinstance(exc, MessageNacked):
                raise RefusedError("a queue that it would go to is full, and rejects it") from exc
            if isinstance(exc, (OSError, *connection.connection_errors)):
                raise OperationalError(str(exc)) from exc
            raise
        if producer.is_broken:
            self._rest.after(began)
        if producer.is_broken or len(self._idle) >= IDLE_MOST:
            connection.collect()
        else:
            self._idle.append(producer)
        return sent

    def close(self) -> None:
        """Close the connections that are idle."""
        while idle := self._take_idle():
            idle.connection.collect()

    def _take_idle(self) -> OwnProducer | None:
        try:
            return self._idle.pop()
        except IndexError:  # perhaps another thread has just taken the last one
            return None


def own_producers(app: Celery) -> OwnProducers:
    """Return the producers of this process; a forked child makes its own."""
    kept = vars(app).setdefault("_dislock_producers", {})
    try:
        producers: OwnProducers = kept[os.getpid()]
    except KeyError:
        producers = OwnProducers(app)
        kept.clear()
        kept[os.getpid()] = producers
    return producers


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """
    Ask a broker or a result backend something, and wait for this time at most.

    Any client may wait for ever.  So a thread asks.  If it gets no answer in time it is left alone,
    and ends with the answer or the process.  While a worker's event loop waits here it forks
    nothing; later, the thread stands in the client's read, and holds nothing that a child inherits.

    Raises:
        Exception: What *ask* raises; TimeoutError: no answer in time.
    """
    answer: Future[T] = Future()

    def tell() -> None:
        try:
            answer.set_result(ask())
        except Exception as exc:  # noqa: BLE001 -- of any client, for the caller
            answer.set_exception(exc)

    Thread(target=tell, name="dislock-asks", daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()
