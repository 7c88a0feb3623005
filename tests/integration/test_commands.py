"""``celery dislock ...`` on a real server: what each command prints, changes, and ends with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock import Dislock, SingletonTask
from celery_dislock.messages.message import Message
from celery_dislock.operating.cli import dislock as command
from celery_dislock.operating.cli.table import width_of
from celery_dislock.parking.store import Ticket
from celery_dislock.servers.replies import Parked
from celery_dislock.servers.store import Store
from tests.holding import name_of
from tests.integration.strange import FAR, STRANGE, UNREADABLE, damage
from tests.integration.test_redis_server import wait_until_gone

ROOT = Path(__file__).parents[2]
LONG = 600.0  # seconds: no such lease runs out by itself
LIMIT = 30  # seconds for a command
AWAY, USAGE, FOUND, HELD, LOST = 3, 2, 1, 75, 76


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False)

    @app.task(
        base=SingletonTask,
        name="shop.export",
        lock_key="export:<corp_id>",
        lock_on_conflict="queue",
        lock_watchdog_timeout=60,
        shared=False,
    )
    def export(corp_id): ...

    yield app
    app.close()


@pytest.fixture
def dislock(app):
    """Run a command of the app; the answer has ``exit_code``, ``stdout`` and ``stderr``."""

    def run(*args, **how):
        answer = CliRunner().invoke(command, args, obj=SimpleNamespace(app=app), **how)
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            raise answer.exception
        return answer

    return run


@pytest.fixture
def store(redis_url):
    store = Store(redis_url)
    yield store
    store.close()


def park(app, key, *, task="shop.export"):
    """Park a task in the line of a key that is held; return its id."""
    process = Dislock(app).runtime.process
    task_id = str(uuid.uuid4())
    headers = {"task": task, "id": task_id, "argsrepr": "(7,)", "kwargsrepr": "{}"}
    message = Message("", "celery", headers, "application/json", "utf-8", {}, True, b"[[7],{},{}]")
    ticket = Ticket(f"{task_id}:0:0", f"{task_id}@", False, message.to_bytes())
    process.lines.enlist(name_of(key))
    parked = process.lines.park(name_of(key), f"{task_id}@w/1", LONG, "{}", ticket)
    assert isinstance(parked, Parked)
    return task_id


def hold(store, key, **holder):
    """Take a lock as a task does."""
    about = {"task": "shop.export", "id": "id-1", "worker": "celery@w1", "pid": 7, "host": "h"}
    owner = f"{uuid.uuid4()}@celery@w1:7/1"
    written = json.dumps({**about, "timeout": LONG, **holder})
    store.acquire([name_of(key)], owner, LONG, written)
    return owner


def reserve(redis_client, key, state):
    """Write the record of a key that is reserved for id-9, for nine seconds."""
    record = f"2 {state} 1700000000000 1 id-9 {FAR} n 3 1 mark 3 3 2 {FAR} id-8"
    redis_client.set(f"{name_of(key)}:unique", record, px=9000)


def pass_time(redis_client, key, seconds):
    """Let a reservation be older, as if nobody had touched it for so long."""
    name = f"{name_of(key)}:unique"
    record = redis_client.get(name).split(" ")
    for at in (2, 3, 5):  # since, first and ends
        record[at] = str(int(record[at]) - int(seconds * 1000))
    redis_client.set(name, " ".join(record), keepttl=True)


class TestList:
    def test_a_purged_message_is_told_within_minutes(self, dislock, app, redis_client):
        """By lists and by doctor; one that waits in its queue is a backlog, and no trouble."""

        @app.task(base=SingletonTask, name="report", lock_unique_until="end", shared=False)
        def report(n): ...

        (key,) = report.dislock_guard.keys((1,), {})
        report.delay(1)
        pass_time(redis_client, key, 400)
        assert json.loads(dislock("ls", "--json").stdout)[0]["troubles"] == []
        app.control.purge()
        assert json.loads(dislock("ls", "--json").stdout)[0]["troubles"] == ["unmet"]
        assert " unmet 6 min " in dislock("ls").stdout
        told = json.loads(dislock("doctor", "--json", "--timeout", "0.1").stdout)["findings"]
        [found] = [one for one in told if one["check"] == "reservations"]
        assert (found["level"], "nothing waits in celery" in found["what"]) == ("warning", True)
        assert "  unmet: Reserved for a message " in dislock("show", key).stdout
        assert dislock("free", key, "--yes").exit_code == 0
        assert dislock("ls").stderr == "No lock matches.\n"

    def test_a_row_is_a_line_of_80_columns(self, dislock, store, redis_client, app):
        """Through a pipe, with ids as Celery makes them, several leases, and keys of strangers."""
        who = {"id": str(uuid.uuid4()), "worker": "celery@worker-1.example.com"}
        keys = ["export:7", "k" * 160, "\u4e2d\u6587" * 25, "\U0001f512" * 30, "\x1b[31m\n\t" * 9]
        for key in keys:
            hold(store, key, **who)
        park(app, "export:7", task="\u4e2d" * 90)
        for asked, rows in ((("ls",), len(keys)), (("line", "export:7"), 1)):
            printed = dislock(*asked, env={"COLUMNS": "80"}).stdout.splitlines()
            assert len(printed) == rows + 1
            assert max(map(width_of, printed)) <= 80
            assert who["id"] not in "".join(printed)
        assert who["id"] in dislock("show", "export:7").stdout
        assert who["id"] in dislock("ls", "--json").stdout

    def test_all_that_is_known_of_is_listed(self, dislock, store, app, redis_client):
        """Held, waited for, reserved, paused: a row each, trouble on top."""
        for key in ("c", "a"):
            hold(store, key)
        park(app, "a")
        assert dislock("pause", "b").exit_code == 0
        reserve(redis_client, "d", "w")
        reserve(redis_client, "e", "-")  # only numbers are kept: it is free
        printed = dislock("ls").stdout.splitlines()
        assert [row.split()[0] for row in printed] == ["KEY", "a", "b", "c", "d"]
        assert " no worker " in printed[1]  # sweeps the line
        assert "shop.export[id-1] on celery@w1" in printed[1]
        assert " paused " in printed[2]
        assert "reserved for id-9, waiting" in printed[4]
        told = json.loads(dislock("ls", "--json").stdout)
        assert [one["key"] for one in told] == ["a", "b", "c", "d"]
        assert (told[0]["waiting"], told[1]["limit"]) == (1, 0)
        assert told[3]["reservation"]["id"] == "id-9"

    @pytest.mark.parametrize("command", ["ls", "show", "line", "top", "doctor"])
    def test_no_record_stops_a_command_for_all_locks(self, dislock, store, redis_client, command):
        """Whatever stands in the records of some locks, the others are told."""
        hold(store, "whole")
        damage(redis_client)
        about = ("whole",) if command in {"show", "line"} else ()
        for options in ((), ("--json",)) if command != "top" else ((),):
            answer = dislock(command, *about, *options)
            assert "Traceback" not in answer.output
            assert answer.exit_code in {0, FOUND}
            answer.stdout.encode()
            if options:
                json.loads(answer.stdout, parse_constant=pytest.fail)
        if command == "ls":
            told = json.loads(answer.stdout)
            assert len([one for one in told if "error" in one]) == len(UNREADABLE)
            assert len(told) == len(UNREADABLE) + len(STRANGE) + 3
        if command not in {"doctor", "line"}:
            assert "whole" in answer.stdout


def start(redis_url, *args):
    """Start a command in a process of its own."""
    code = (
        "import sys; from types import SimpleNamespace; from celery import Celery; "
        "from celery_dislock.operating.cli import dislock; app = Celery(broker=sys.argv.pop(1)); "
        "dislock(sys.argv[1:], obj=SimpleNamespace(app=app))"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, redis_url, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Return the exit code, and what it has printed."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


class TestPutBack:
    def test_what_was_set_aside_is_sent_again(self, dislock, store, app, redis_client):
        """To its queue; what cannot be read, and what is another broker's, stays."""
        hold(store, "k")
        process = Dislock(app).runtime.process
        task_id = park(app, "k")
        name = name_of("k")
        ((ticket, record),) = [
            one for one in redis_client.hgetall(f"{name}:tickets").items() if one[0] != "bytes"
        ]
        message = record[record.index('1 {"') :]
        aside = {
            ticket: record,
            "bare:0:0": message,
            "damaged:0:0": "1 ",
            "other:0:0": record.replace(process.store.home, "elsewhere"),
        }
        redis_client.hset(f"{name}:aside", mapping=aside)
        told = dislock("put-back", "k", "--ticket", ticket)
        assert (told.exit_code, told.stdout) == (0, f"{ticket}: put back\n")
        answer = dislock("put-back", "k", "--json")
        problems = {one["ticket"]: one["problem"] for one in json.loads(answer.stdout)}
        assert problems["bare:0:0"] is None
        assert problems["other:0:0"] == "its message belongs to another broker"
        assert problems["damaged:0:0"].startswith("its message is lost")
        assert set(redis_client.hkeys(f"{name}:aside")) == {"damaged:0:0", "other:0:0"}
        sent = [json.loads(one)["headers"]["id"] for one in redis_client.lrange("celery", 0, -1)]
        assert sent == [task_id] * 2


class TestRun:
    def test_signals_reach_the_command(self, redis_url, redis_client):
        """The command decides what becomes of them, and its exit code counts."""
        script = "trap 'exit 9' INT; echo ready; while :; do sleep 0.05; done"
        process = start(redis_url, "run", "k", "--", "sh", "-c", script)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 9
        assert redis_client.keys("dislock:{k}*") == []

    @pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
    def test_a_lost_lock_ends_the_command_and_what_it_started(
        self, redis_url, redis_client, tmp_path, trap
    ):
        """TERM, and KILL after the grace time for what ignores it; exit code 76."""
        pid = tmp_path / "pid"
        script = f"{trap}sleep 300 & echo $! > {pid}; echo ready; while :; do sleep 0.05; done"
        options = ["--watchdog-timeout", "1", "--grace", "0.5"]
        process = start(redis_url, "run", "k", *options, "--", "sh", "-c", script)
        assert process.stdout.readline() == "ready\n"
        redis_client.delete(name_of("k"))
        code, _, err = ended(process)
        assert code == LOST
        assert "lock 'k' is lost" in err
        wait_until_gone(int(pid.read_text()))
