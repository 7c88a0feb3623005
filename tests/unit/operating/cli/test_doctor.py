"""The command ``doctor``: what it asks the broker, and what it writes."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Event

import pytest
from celery import Celery

from celery_dislock.operating.checks import locks, server, workers
from celery_dislock.operating.checks.table import Finding
from celery_dislock.operating.checks.troubles import TROUBLES
from celery_dislock.operating.cli import doctor
from celery_dislock.operating.cli.doctor import Report, ask_workers
from celery_dislock.operating.site import ANSWERS_WITHIN
from tests.unit.operating.checks.examples import described


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
    return ask_workers(app, 0.5)


def test_who_answers_the_ping_is_asked_by_name(app, monkeypatch):
    """So the other question ends with the last answer, and not after the whole time."""
    fleet = asking(
        app,
        monkeypatch,
        ping=[{name: {"ok": "pong"}} for name in ("w4", "w3", "w2", "w1")],
        dislock=[
            {"w1": described(version="1")},
            {"w2": {"error": "KeyError"}},
            {"w3": described(tasks=7)},
        ],
    )
    assert fleet.answers["w1"]["version"] == "1"
    assert [fleet.answers[name] for name in ("w2", "w3", "w4")] == [None, None, None]
    assert fleet.error == ""
    (_, ping), (_, told) = app.control.asked
    assert "destination" not in ping
    assert (told["destination"], told["limit"], told["timeout"]) == (
        ["w1", "w2", "w3", "w4"],
        4,
        0.5,
    )


def test_without_workers_nothing_else_is_asked(app, monkeypatch):
    """No answer, or no list of answers at all."""
    assert asking(app, monkeypatch) == ({}, "")
    assert len(app.control.asked) == 1


def test_a_broker_that_is_away_is_told(app, monkeypatch):
    """Nothing is raised: the lock server may well be there."""

    def fail(_command, **_how):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(app.control, "broadcast", fail)
    assert ask_workers(app, 0.5).error == "Connection refused"


def test_a_redis_broker_is_not_waited_for_for_ever():
    """Kombu sets no time limits; those that the app sets stay."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    app.conf.broker_transport_options = given = {"socket_timeout": 77, "visibility_timeout": 5}
    assert ask_workers(app, 1.0).error
    assert app.conf.broker_transport_options == {
        **given,
        "socket_connect_timeout": ANSWERS_WITHIN,
    }


def test_a_broker_that_says_nothing_is_not_waited_for(app, monkeypatch):
    """A RabbitMQ without memory or disk reads nothing any more, and says that it blocks."""
    monkeypatch.setattr(doctor, "ANSWERS_WITHIN", 0.0)
    goes_on = Event()
    monkeypatch.setattr(doctor, "_ask", lambda *_: goes_on.wait(60))
    assert ask_workers(app, 0.05).error == "no answer in time"

    def says_why(_app, _timeout, blocked):
        blocked.append("connection blocked, see broker logs")
        goes_on.wait(60)

    monkeypatch.setattr(doctor, "_ask", says_why)
    assert "blocked" in ask_workers(app, 0.05).error
    goes_on.set()


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


def test_the_page_has_a_row_for_each_check():
    """And no row for a check that is gone."""
    page = (Path(__file__).parents[4] / "docs/reference/doctor.md").read_text("utf-8")
    section = page.partition("### What it looks at")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    tables = [workers.ROWS, server.ROWS, *(one.CHECKS for one in (workers, locks, server))]
    checks = {row[0] for table in tables for row in table} | {one.row.check for one in TROUBLES}
    assert named == checks | {*server.AS_AT_START}


def test_the_page_of_the_commands_has_each_trouble():
    """Lists name what doctor explains."""
    page = (Path(__file__).parents[4] / "docs/reference/command-line.md").read_text("utf-8")
    rows = page.partition("| `TROUBLE` |")[2].partition("\n\n##")[0]
    assert {one.name for one in TROUBLES} <= set(re.findall(r"^\| `(.*?)` \|", rows, re.MULTILINE))
