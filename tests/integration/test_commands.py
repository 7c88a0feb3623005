"""``celery dislock ...`` on a real server: what only that shows, and commands under a lock."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock import Dislock as Locks
from celery_dislock import SingletonTask
from celery_dislock.operating.cli import running
from celery_dislock.parking.process import runtime_of
from tests.commands import CANNOT_RUN, FOUND, HELD, LOST, NOT_FOUND, USAGE, Dislock
from tests.holding import name_of, wait_for
from tests.integration.strange import STRANGE, UNREADABLE, damage
from tests.programs import wait_until_gone

ROOT = Path(__file__).parents[2]
LIMIT = 30  # seconds for a command
FULL = Path("/dev/full")


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False)
    yield app
    runtime_of(app).close()
    app.close()


@pytest.fixture
def dislock(app):
    return Dislock(app)


@pytest.fixture
def held(redis_url):
    """Have a lock held by another thread while a block runs."""

    @contextmanager
    def held(key, **options):
        with Locks.from_url(redis_url) as locks, ThreadPoolExecutor(1) as thread:
            lock = locks.lock(key, **options)
            thread.submit(lock.acquire).result()
            yield
            thread.submit(lock.release).result()

    return held


def pass_time(redis_client, key, seconds):
    """Let a reservation be older, as if nobody had touched it for so long."""
    name = f"{name_of(key)}:unique"
    record = redis_client.get(name).split(" ")
    for at in (2, 4, 5):  # ends, since and first
        record[at] = str(int(record[at]) - int(seconds * 1000))
    redis_client.set(name, " ".join(record), keepttl=True)


def test_a_purged_message_is_told_within_minutes(dislock, app, redis_client):
    """By lists and by doctor; one that waits in its queue is a backlog, and no trouble."""

    @app.task(base=SingletonTask, name="report", lock_unique_until="end", shared=False)
    def report(n): ...

    key = report.lock_for(1).key
    report.delay(1)
    pass_time(redis_client, key, 362)
    assert dislock.json("ls")[0]["troubles"] == []
    app.control.purge()
    assert dislock.json("ls")[0]["troubles"] == ["unmet"]
    assert " unmet 6 min " in dislock("ls").stdout
    told = dislock.json("doctor", "--timeout", "0.1")["findings"]
    [found] = [one for one in told if one["check"] == "reservations"]
    assert (found["level"], "nothing waits in celery" in found["what"]) == ("warning", True)
    assert "  unmet: Reserved for a message " in dislock("show", key).stdout
    assert dislock("free", key, "--yes").exit_code == 0
    assert dislock("ls").stderr == "No lock matches.\n"


@pytest.mark.parametrize("words", ["ls {}", "pause k --note {}", "limit k 3 --note {}"])
def test_bytes_that_are_no_text_are_wrong_usage(dislock, words):
    """A terminal of another encoding may send them; Python keeps them as surrogates."""
    answer = dislock(*words.format("f\udcfcr").split())
    assert answer.exit_code == USAGE
    assert re.search(r"f\\udcfcr.* is no UTF-8", answer.stderr)
    assert dislock("ls").stderr == "No lock matches.\n"


@pytest.mark.extra
@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
@pytest.mark.parametrize("command", ["ls", "show k", "ls --json", "why id", "ls --help"])
def test_an_output_that_cannot_be_written_is_a_message(redis_url, command):
    """The disk is full, say: no traceback, and not the exit code of a command that is done."""
    program = [sys.executable, "-m", "celery", "dislock", "--dislock-url", redis_url]
    with FULL.open("w") as full, Locks.from_url(redis_url) as locks, locks.lock("k"):
        done = subprocess.run(
            [*program, *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("command", ["ls", "show", "line", "doctor"])
def test_no_record_stops_a_command_for_all_locks(dislock, held, redis_client, command):
    """Whatever stands in the records of some locks, the others are told."""
    with held("whole"):
        damage(redis_client)
        about = ("whole",) if command in {"show", "line"} else ()
        answer = dislock(command, *about)
        told = dislock.json(command, *about)
    assert "Traceback" not in answer.output
    assert answer.exit_code in {0, FOUND}
    answer.stdout.encode()
    if command == "ls":
        assert len([one for one in told if "error" in one]) == len(UNREADABLE)
        assert len(told) == len(UNREADABLE) + len(STRANGE) + 3
    if command not in {"doctor", "line"}:
        assert "whole" in answer.stdout


class Script:
    """A program that says that it runs, with its environment, and waits until it may end."""

    def __init__(self, folder, client):
        self._folder, self._client = folder, client
        told = "env > told; mv told began; while [ ! -e go ]; do sleep 0.02; done; exit 9"
        self.words = ["sh", "-c", f"cd {folder}; {told}"]
        self.key = self.environment = self.record = None
        self._looks = threading.Thread(target=self._look)

    def started(self, key):
        """Look at the lock once the program runs; return its words."""
        self.key = key
        self._looks.start()
        return self.words

    def _look(self):
        wait_for((self._folder / "began").exists, "the program")
        lines = (self._folder / "began").read_text().splitlines()
        self.environment = dict(line.split("=", 1) for line in lines if line[:8] == "DISLOCK_")
        self.record = {
            owner: record.split(" ", 5)
            for owner, record in self._client.hgetall(name_of(self.key)).items()
        }
        (self._folder / "go").touch()

    @property
    def lease(self):
        """Owner, token, mode, and how the holder describes itself."""
        self._looks.join()
        [(owner, (_, _, token, _, mode, about))] = [
            one for one in self.record.items() if one[0] == self.environment["DISLOCK_OWNER"]
        ]
        return owner, token, mode, json.loads(about)


@pytest.fixture
def script(tmp_path, redis_client):
    return Script(tmp_path, redis_client)


class TestRun:
    @pytest.mark.parametrize("word", ["k", "-k"])
    def test_the_command_has_the_lock_in_its_environment(self, dislock, script, redis_client, word):
        """All words after -- are the command's; its exit code is passed on, the lock is free."""
        words = [word] if word == "k" else ["--", word]
        before = signal.getsignal(signal.SIGTERM)
        answer = dislock("run", "--timeout", "0", *words, "--", *script.started(word))
        owner, token, mode, about = script.lease
        told = {"DISLOCK_KEY": word, "DISLOCK_OWNER": owner, "DISLOCK_TOKEN": token}
        assert (answer.exit_code, script.environment) == (9, told)
        assert (mode, about["timeout"], about["pid"]) == ("x", 30.0, os.getpid())
        assert redis_client.keys("dislock:*") == []
        assert signal.getsignal(signal.SIGTERM) == before

    @pytest.mark.parametrize(
        ("command", "code", "told"),
        [
            (["sh", "-c", "kill -9 $$"], 128 + 9, ""),
            (["\x1b[31mmake"], NOT_FOUND, "Error: \\x1b[31mmake: not found\n"),
            (["/etc/passwd"], CANNOT_RUN, "Error: /etc/passwd: cannot be run\n"),
            (["{}"], CANNOT_RUN, "Error: {}: cannot be run\n"),  # no program, for all its rights
            ([], USAGE, ""),
        ],
    )
    def test_how_it_ends_is_told_as_by_a_shell(self, dislock, tmp_path, command, code, told):
        """Also what cannot be started."""
        (tmp_path / "empty").write_bytes(b"\0")
        (tmp_path / "empty").chmod(0o700)
        path = str(tmp_path / "empty")
        answer = dislock("run", "k", "--", *(path if word == "{}" else word for word in command))
        assert answer.exit_code == code
        assert code == USAGE or answer.stderr == told.format(path)

    def test_another_that_holds_the_lock(self, dislock, held, tmp_path):
        """Nothing is started; nor if the time to wait is none."""
        with held("k"):
            answer = dislock("run", "k", "--timeout", "0", "--", "touch", str(tmp_path / "ran"))
        assert answer.exit_code == HELD
        assert "lock 'k' is held by thread " in answer.stderr
        assert dislock("run", "k", "--timeout", "-1", "--", "true").exit_code == USAGE
        assert not (tmp_path / "ran").exists()

    def test_the_options_of_a_lock(self, dislock, script, held):
        """They are those of Dislock.lock."""
        options = ["--mode", "shared", "--watchdog-timeout", "2m", "--unfair", "--timeout", "0"]
        with held("k", mode="shared"):
            dislock("run", "k", *options, "--", *script.started("k"))
        _, _, mode, about = script.lease
        assert (mode, about["timeout"]) == ("s", 120.0)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--limit", "5", "--cost", "6"], "a cost of 6 is more than the limit, 5"),
            (["--rate", "5/m", "--cost", "6"], "a cost of 6 is more than the rate, 5 a minute"),
            (["--cost", "2"], "a cost needs a limit or a rate: give one, or leave the cost out"),
            (["--limit", "5", "--cost", "0"], "0 is not in the range x>=1"),
        ],
    )
    def test_a_cost_that_cannot_be(self, dislock, options, told):
        """It is told as the other options are."""
        answer = dislock("run", "k", *options, "--", "true")
        assert answer.exit_code == USAGE
        assert told in " ".join(answer.stderr.split())

    def test_a_cost_that_arguments_tell_has_to_be_given(self, dislock, script):
        """--args chooses the lock; without --cost the command is refused, and not counted as 1."""

        @dislock.app.task(
            base=SingletonTask, name="t", shared=False, lock_key="k", lock_limit=5, lock_cost="<n>"
        )
        def task(n): ...

        words = ["run", "--task", "t", "--args", "[3]"]
        answer = dislock(*words, "--", "true")
        assert answer.exit_code == USAGE
        assert "cost='<n>': give a whole number from 1 on" in answer.stderr
        dislock(*words, "--cost", "3", "--", *script.started("k"))
        assert script.lease[2] == "x3"

    def test_the_options_of_a_task_hold_unless_others_are_given(self, dislock, script, held):
        """The lock of a task has the task's terms."""
        terms = {"lock_key": ["b", "a"], "lock_limit": 2, "lock_watchdog_timeout": 60}

        @dislock.app.task(base=SingletonTask, name="t", shared=False, **terms)
        def task(): ...

        options = ["--watchdog-timeout", "90", "--timeout", "0"]
        with held(["a", "b"], limit=2):
            answer = dislock("run", "--task", "t", *options, "--", *script.started("a"))
        assert answer.exit_code == 9
        assert script.lease[3]["timeout"] == 90.0
        assert script.environment["DISLOCK_KEY"] == "a + b"

    @pytest.mark.parametrize(
        ("terms", "options", "mode", "timeout"),
        [
            ({"lock_expire": 600}, [], "x", None),
            ({"lock_expire": 600}, ["--watchdog-timeout", "90"], "x", 90.0),
            ({"lock_watchdog_timeout": 60}, ["--expire", "90"], "x", None),
            ({"lock_mode": "shared"}, [], "s", 30.0),
            ({"lock_mode": "shared"}, ["--mode", "exclusive"], "x", 30.0),
            ({"lock_mode": "shared"}, ["--limit", "2"], "x", 30.0),
            ({"lock_limit": 2}, ["--mode", "shared"], "s", 30.0),
            ({"lock_rate": "100/m"}, [], "x", 30.0),
            ({"lock_limit": 5, "lock_cost": 3}, [], "x3", 30.0),
            ({"lock_limit": 5, "lock_cost": 3}, ["--cost", "2"], "x2", 30.0),
        ],
        ids=str,
    )
    def test_what_has_no_effect_beside_an_option_of_a_task_is_left_out(
        self, dislock, script, terms, options, mode, timeout
    ):
        """The defaults of the others, and what is given in place of one."""

        @dislock.app.task(base=SingletonTask, name="t", lock_key="k", shared=False, **terms)
        def task(): ...

        answer = dislock("run", "--task", "t", *options, "--", *script.started("k"))
        assert (answer.exit_code, answer.stderr) == (9, "")
        assert (script.lease[2], script.lease[3].get("timeout")) == (mode, timeout)

    @pytest.mark.parametrize("name", running.PASSED_ON)
    def test_a_signal_while_it_is_started_reaches_it(self, dislock, monkeypatch, request, name):
        """It comes when the command has begun, and nobody knows that yet."""
        popen, number = subprocess.Popen, getattr(signal, name)
        # Whoever runs these tests in the background may ignore it.
        before = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda: signal.signal(number, before))

        def start(*args, **options):
            process = popen(*args, **options)
            signal.raise_signal(number)
            return process

        monkeypatch.setattr(running.subprocess, "Popen", start)
        assert dislock("run", "k", "--", "sleep", "60").exit_code == 128 + number

    def test_a_signal_before_the_command_ends_us(self, dislock, held, redis_client):
        """While we wait for the lock; one that ends nobody is ignored."""

        def send():
            wait_for(lambda: redis_client.exists(f"{name_of('k')}:line"), "a place in line")
            for number in (signal.SIGUSR1, signal.SIGTERM):
                signal.pthread_kill(threading.main_thread().ident, number)

        with held("k"):
            sender = threading.Thread(target=send)
            sender.start()
            answer = dislock("run", "k", "--", "true")
            sender.join()
        assert answer.exit_code == 128 + signal.SIGTERM

    def test_signals_reach_the_command(self, redis_url, redis_client):
        """The command decides what becomes of them, and its exit code counts."""
        # Not INT, which a shell ignores for what it runs in the background, as this test may be.
        script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
        process = start(redis_url, "run", "k", "--", "sh", "-c", script)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 9
        assert redis_client.keys("dislock:{k}*") == []

    def test_a_signal_that_is_ignored_is_ignored_by_the_command(self, dislock):
        """As under nohup: what goes on after a logout must not be ended by it."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            answer = dislock("run", "k", "--", "sh", "-c", "kill -HUP $PPID; kill -HUP $$; exit 9")
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)
        assert answer.exit_code == 9

    @pytest.mark.extra
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
        assert "another may have run beside it" in err
        wait_until_gone(int(pid.read_text()))

    def test_the_command_does_not_outlive_a_lease_that_ended_at_its_cap(self, dislock):
        """It is told that the lock was lost: exit code 76, and why."""
        options = ["--watchdog-timeout", "1", "--max-renew-times", "1"]
        answer = dislock("run", "k", *options, "--", "sleep", "60")
        assert answer.exit_code == LOST
        assert "it was renewed 1 times, its cap" in answer.output


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
