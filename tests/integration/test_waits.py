"""Each wait for a broker has an end, and what comes of it is known."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Thread
from types import SimpleNamespace

import pytest
from amqp.exceptions import MessageNacked
from celery import Celery
from kombu.exceptions import OperationalError

from celery_dislock.messages import broker
from celery_dislock.messages.broker import OwnProducer, OwnProducers, RefusedError, own_producers
from celery_dislock.messages.resending import publish
from celery_dislock.parking.process import runtime_of
from tests.unit.messages.test_resending import message

LIMIT = 60.0  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(broker, "BROKER_WITHIN", 0.3)
    monkeypatch.setattr(broker, "SLOW", 0.2)


@pytest.fixture
def silent():
    """A broker that accepts connections and never answers: its port, and who has come."""
    came = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def accept():
            while True:
                try:
                    came.append(listening.accept()[0])
                except OSError:
                    return

        Thread(target=accept, daemon=True).start()
        yield SimpleNamespace(port=listening.getsockname()[1], came=came)
        listening.shutdown(socket.SHUT_RDWR)
    for one in came:
        one.close()


@pytest.fixture
def app():
    """An app whose broker is in this process; its connections are closed."""
    with closing(Celery("shop", broker="memory://", set_as_current=False)) as app:
        yield app
        own_producers(app).close()


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_never_answers_is_given_up_and_left_alone(silent, scheme):
    """The caller is an event loop: the next messages of the batch do not wait again."""
    url = f"{scheme}://127.0.0.1:{silent.port}/0"
    with Celery("shop", broker=url, set_as_current=False) as app, ThreadPoolExecutor(1) as pool:
        with pytest.raises(OperationalError):
            pool.submit(publish, app, message(), {}).result(LIMIT)
        came = len(silent.came)
        with pytest.raises(OperationalError, match="left alone"):
            pool.submit(publish, app, message(), {}).result(LIMIT)
        assert came == len(silent.came) > 0


def test_a_connection_that_was_closed_meanwhile_is_replaced(app):
    """A broker closes those that are idle; the message goes by another one."""
    own, used = own_producers(app), []

    def send(producer):
        used.append(producer)
        if len(used) == 2:
            raise ConnectionResetError
        return "sent"

    assert [own.send(send), own.send(send), own.send(send)] == ["sent"] * 3
    first, second, third, fourth = used
    assert first is second
    assert third is fourth is not first


def test_an_error_of_what_publishes_is_none_of_the_connection(app):
    """It is raised, and nothing is published a second time."""
    own, used = own_producers(app), []

    def send(producer):
        used.append(producer)
        raise IndexError

    own.send(bool)
    with pytest.raises(IndexError):
        own.send(send)
    assert len(used) == 1


def test_a_connection_is_kept_for_the_next_message_unless_a_reply_is_missing(app):
    """What comes late would be taken for the answer to another question."""
    own, used = own_producers(app), []

    def send(producer, *, is_broken):
        used.append(producer)
        producer.is_broken = is_broken

    for is_broken in (False, True, False):
        own.send(lambda producer, is_broken=is_broken: send(producer, is_broken=is_broken))
    assert used[0] is used[1] is not used[2]


def test_a_process_that_closes_leaves_no_connection_to_the_broker(app):
    """Nor does it wait for the garbage collector to close them."""
    app.conf.dislock_url, used = "memory://", []
    runtime = runtime_of(app)
    assert runtime.process.can_park
    own_producers(app).send(used.append)
    connection = used[0].connection
    assert connection.connected
    runtime.close()
    assert not connection.connected


def test_a_message_that_a_full_queue_rejects_was_refused(app):
    """The broker is there, and says no: a publisher's confirm, negative."""

    def send(_):
        raise MessageNacked

    with pytest.raises(RefusedError, match="is full") as refused:
        OwnProducers(app).send(send)
    assert broker.away_or_refuses(refused.value).startswith("the broker refuses its message: ")
    away = broker.away_or_refuses(OperationalError("gone"))
    assert away == "the broker is away: gone"


class TestRabbitMQ:
    @pytest.fixture
    def producer(self, app):
        """A producer whose connection says what a RabbitMQ would."""
        with closing(OwnProducer(app)) as producer:
            producer.asked = []
            producer.answer = lambda: None

            def ask(*_):
                producer.asked.append(1)
                producer.answer()

            producer.channel.basic_qos = ask
            yield producer
            producer.connection.collect()

    def test_one_in_alarm_is_not_waited_for(self, producer):
        """It says that it blocks the connection, and answers when the alarm has ended."""

        def block():
            producer._blocked("low on memory")
            raise TimeoutError  # if the client went on waiting

        producer.answer = block
        producer.listen()
        assert producer.is_blocked
        assert not producer.is_broken
        producer.listen()
        assert producer.asked == [1]
        producer._unblocked()
        producer.answer = lambda: None
        producer.listen()
        assert producer.asked == [1, 1]

    def test_one_that_blocks_while_nobody_listens_raises_nothing(self, producer):
        """Frames are read before a message is written, which goes on."""
        producer._blocked("low on disk")
        assert producer.is_blocked

    def test_an_answer_that_does_not_come_breaks_the_connection(self, producer):
        """The message may have arrived, as without a question."""

        def time_out():
            raise TimeoutError

        producer.answer = time_out
        producer.listen()
        assert producer.is_broken

    def test_a_refusal_is_raised(self, producer):
        """Its exchange is gone, for one."""

        def refuse():
            raise LookupError

        producer.answer = refuse
        with pytest.raises(LookupError):
            producer.listen()
