"""The command ``doctor``: what it asks the broker, and what it writes."""

from __future__ import annotations

from uuid import uuid4

import pytest
from celery import Celery

from celery_dislock.operating.cli import doctor
from celery_dislock.operating.cli.doctor import ANSWERS_WITHIN, Workers, as_dict
from celery_dislock.operating.cli.session import Session
from celery_dislock.operating.doctor import Report
from celery_dislock.operating.findings import Finding


class Answering:
    """Replies of workers, by command; what was asked is noted."""

    def __init__(self, **replies):
        self.replies = replies
        self.asked = []

    def broadcast(self, command, **how):
        self.asked.append((command, how))
        return self.replies.get(command)


@pytest.fixture
def app():
    return Celery("shop", broker="memory://", set_as_current=False)


def asking(app, monkeypatch, **replies):
    monkeypatch.setattr(app, "control", Answering(**replies))
    return Workers(app, 0.5)


def test_who_answers_the_ping_is_asked_by_name(app, monkeypatch):
    """So the other questions end with the last answer, and not after the whole time."""
    workers = asking(
        app,
        monkeypatch,
        ping=[{"w2": {"ok": "pong"}}, {"w1": {"ok": "pong"}}],
        dislock=[{"w1": {"leases": [], "version": "1"}}, {"w2": {"error": "KeyError"}}],
        active_queues=[{"w1": [{"name": "celery"}]}, {"w2": None}],
    )
    fleet = workers.fleet()
    assert fleet.answers["w1"]["version"] == "1"
    assert fleet.answers["w2"] is None
    assert fleet.queues == {"w1": [{"name": "celery"}]}
    assert fleet.error == ""
    (_, ping), (_, told), _ = app.control.asked
    assert "destination" not in ping
    assert (told["destination"], told["limit"], told["timeout"]) == (["w1", "w2"], 2, 0.5)


def test_without_workers_nothing_else_is_asked(app, monkeypatch):
    """No answer, or no list of answers at all."""
    workers = asking(app, monkeypatch)
    assert workers.fleet() == ({}, {}, "", [])
    assert len(app.control.asked) == 1
    assert workers.known(["id-1"]) == set()


def test_workers_that_share_a_name_are_noticed(app, monkeypatch):
    """Celery warns of that, too, but not in its answers."""
    workers = asking(app, monkeypatch, ping=[{"w1": {}}, {"w1": {}}, {"w2": {}}])
    assert workers.fleet().twice == ["w1"]


def test_a_broker_that_is_away_is_told(app, monkeypatch):
    """Nothing is raised: the lock server may well be there."""

    def fail(_command, **_how):
        raise ConnectionRefusedError(111, "Connection refused")

    workers = asking(app, monkeypatch)
    app.control.broadcast = fail
    assert workers.fleet().error == "Connection refused"
    workers._names = ["w1"]
    assert workers.known(["id-1"]) == {"id-1"}  # nothing is said of it


def test_task_ids_that_a_worker_knows(app, monkeypatch):
    """Received, waiting for an ETA, or running."""
    workers = asking(
        app,
        monkeypatch,
        ping=[{"w1": {}}],
        query_task=[{"w1": {"id-1": ["active", {}]}}],
    )
    workers.fleet()
    assert workers.known(["id-1", "id-2"]) == {"id-1"}


def test_whether_all_queues_are_empty(app, monkeypatch):
    """Those of the workers and of the app; a queue that does not exist is no answer."""
    mine, default = f"mine-{uuid4()}", f"celery-{uuid4()}"  # all tests share the broker in memory
    app.conf.task_default_queue = default
    workers = asking(app, monkeypatch, ping=[{"w1": {}}], active_queues=[{"w1": [{"name": mine}]}])
    workers.fleet()
    assert workers.empty() is None
    with app.connection_for_write() as connection:
        for name in (mine, default):
            connection.default_channel.queue_declare(queue=name)
        assert workers.empty() is True
        connection.SimpleQueue(mine).put("x")
        assert workers.empty() is False


def test_a_redis_broker_is_not_waited_for_for_ever():
    """Kombu sets no time limits; those that the app sets stay."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    app.conf.broker_transport_options = {"socket_timeout": 77, "visibility_timeout": 5}
    Workers(app, 1.0)
    assert app.conf.broker_transport_options == {
        "socket_timeout": 77,
        "socket_connect_timeout": ANSWERS_WITHIN,
        "visibility_timeout": 5,
    }


def test_json_has_the_findings_and_their_numbers():
    """In the order in which people read them."""
    examined = Report([Finding("a", "serious", "x", "y", ["k"]), Finding("b", "ok", "z")], False)
    told = as_dict(examined)
    assert told["counts"] == {"serious": 1, "warning": 0, "note": 0, "ok": 1}
    assert told["findings"][0] == {
        "check": "a",
        "level": "serious",
        "what": "x",
        "remedy": "y",
        "about": ["k"],
    }


def test_long_findings_are_wrapped(capsys, monkeypatch):
    """Each line is readable in a terminal, and a key is never a command to it."""
    monkeypatch.setattr(doctor, "WIDTH", 40)
    what = "Some words that take more than one line, about \x1b[31mred"
    doctor._write(Report([Finding("a", "warning", what, "Do something about it now.")], False))
    assert capsys.readouterr().out.splitlines() == [
        "warning  a: Some words that take more",
        "         than one line, about",
        "         \\x1b[31mred",
        "         -> Do something about it now.",
        "1 warning",
    ]


def test_the_app_here_is_described_as_workers_are(plain_app):
    """It has the tasks that its module declares, and no figures."""
    told = doctor._ours(Session(plain_app))
    assert told["no_server"] is None
    assert "processes" not in told
