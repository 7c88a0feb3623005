"""The exit codes of a command that runs under a lock, and how signals reach it."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from celery_dislock import SingletonTask
from celery_dislock.exceptions import LockHeldError, LockLostError
from celery_dislock.operating.cli import running
from celery_dislock.operating.cli.running import Child

HELD, LOST, CANNOT_RUN, NOT_FOUND = 75, 76, 126, 127


class World:
    """A lock and a child that do what a test says."""

    def __init__(self):
        self.made = None
        self.started = None
        self.refused = self.lost = False
        self.start_code, self.code = 0, 0
        self.grace = None

    def make(self, _runtime, key, given, **terms):
        self.made = (key, {name: one for name, one in given.items() if one is not None}, terms)

        @contextmanager
        def lock():
            if self.refused:
                raise LockHeldError("k", "shop.export[1]", 5.0)
            yield SimpleNamespace(key="k", token=5, owner="me", held=True)
            if self.lost:
                raise LockLostError("k", "expired")

        return lock()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def start(self, command, environment):
        self.started = (command, environment)
        return self.start_code

    def wait(self, goes_on, grace):
        assert goes_on()
        self.grace = grace
        return self.code


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(running, "make_lock", world.make)
    monkeypatch.setattr(running, "Child", lambda: world)
    return world


def test_the_command_has_the_lock_in_its_environment(dislock, world):
    """All words after -- are the command's; its exit code is passed on."""
    world.code = 9
    answer = dislock("run", "k", "--grace", "3", "--", "make", "--timeout", "it")
    assert answer.exit_code == 9
    command, environment = world.started
    assert command == ("make", "--timeout", "it")
    assert environment == {"DISLOCK_KEY": "k", "DISLOCK_TOKEN": "5", "DISLOCK_OWNER": "me"}
    assert world.grace == 3.0


def test_another_that_holds_the_lock(dislock, world):
    """Nothing was started."""
    world.refused = True
    answer = dislock("run", "k", "--", "make")
    assert (answer.exit_code, world.started) == (HELD, None)
    assert "lock 'k' is held by shop.export[1]" in answer.stderr


def test_a_lost_lock_counts_more_than_the_commands_code(dislock, world):
    """Also if the command ended well: another may have run beside it."""
    world.lost = True
    answer = dislock("run", "k", "--", "make")
    assert answer.exit_code == LOST
    assert "The command has ended with 0" in answer.stderr


def test_the_options_of_a_lock(dislock, world):
    """They are those of Dislock.lock."""
    options = ["--mode", "shared", "--watchdog-timeout", "2m", "--max-renew-times", "5", "--unfair"]
    dislock("run", "k", *options, "--timeout", "0", "--", "make")
    stated = {"lock_mode": "shared", "lock_watchdog_timeout": 120.0, "max_renew_times": 5}
    assert world.made == ("k", stated, {"timeout": 0.0, "fair": False})


def test_the_options_of_a_task_hold_unless_others_are_given(dislock, world):
    """The lock of a task has the task's terms."""

    @dislock.app.task(
        base=SingletonTask,
        name="t",
        lock_key=["b", "a"],
        lock_limit=3,
        lock_watchdog_timeout=60,
        shared=False,
    )
    def task(): ...

    dislock("run", "--task", "t", "--watchdog-timeout", "90", "--", "make")
    key, stated, _ = world.made
    assert key == ["a", "b"]
    assert (stated["lock_limit"], stated["lock_watchdog_timeout"]) == (3, 90.0)


@pytest.mark.parametrize("args", [["k"], ["k", "--"], ["k", "--timeout", "-1", "--", "make"]])
def test_wrong_usage(dislock, world, args):
    """Nothing is locked."""
    assert dislock("run", *args).exit_code == 2
    assert world.made is None


PID = 77


class Process:
    """A process that ends after some looks, with a code."""

    pid = PID

    def __init__(self):
        self.looks = 3
        self.code = 0
        self.ended_by = None  # the signal that ends it

    def wait(self, timeout):
        assert timeout > 0
        self.looks -= 1
        if self.looks > 0 or (self.ended_by is not None and self.ended_by not in self.sent):
            raise subprocess.TimeoutExpired("it", timeout)
        return self.code


@pytest.fixture
def process(monkeypatch):
    process = Process()
    process.sent = []
    monkeypatch.setattr(running.subprocess, "Popen", lambda *_args, **_kwargs: process)
    monkeypatch.setattr(os, "killpg", lambda pid, number: process.sent.append((pid, number)[1]))
    clock = iter(range(1000))
    monkeypatch.setattr(running.time, "monotonic", lambda: float(next(clock)))
    return process


def test_signals_are_passed_on_and_the_handlers_put_back(process):
    """While the command runs; after it they are ours again."""
    before = signal.getsignal(signal.SIGTERM)
    with Child() as child:
        assert child.start(["it"], {}) == 0
        for name in running.PASSED_ON:
            signal.raise_signal(getattr(signal, name))
        assert child.wait(lambda: True, 5.0) == 0
    assert process.sent == [getattr(signal, name) for name in running.PASSED_ON]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_command_ends_us(process):
    """While we wait for the lock; one that ends nobody is ignored."""
    with Child():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit) as told:
            signal.raise_signal(signal.SIGTERM)
    assert told.value.code == 128 + signal.SIGTERM
    assert process.sent == []


def test_a_signal_while_it_is_started_is_passed_on(monkeypatch, process):
    """It is not lost, and leaves no command behind that nobody waits for."""

    def popen(*_args, **_kwargs):
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(running.subprocess, "Popen", popen)
    with Child() as child:
        child.start(["it"], {})
    assert process.sent == [signal.SIGTERM]


@pytest.mark.parametrize(("code", "told"), [(0, 0), (5, 5), (-9, 137)])
def test_its_exit_code(process, code, told):
    """A signal that has ended it is told as by a shell."""
    process.code = code
    with Child() as child:
        child.start(["it"], {})
        assert child.wait(lambda: True, 5.0) == told


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (FileNotFoundError(), NOT_FOUND, "not found"),
        (PermissionError(), CANNOT_RUN, "cannot be run"),
        (OSError(8, "x"), CANNOT_RUN, "cannot be run"),
    ],
)
def test_what_cannot_be_started(dislock, monkeypatch, error, code, why):
    """As a shell tells it; the lock was held for that."""

    def popen(*_args, **_kwargs):
        raise error

    world = World()
    monkeypatch.setattr(running, "make_lock", world.make)
    monkeypatch.setattr(running.subprocess, "Popen", popen)
    answer = dislock("run", "k", "--", "\x1b[31mmake")
    assert (answer.exit_code, answer.stderr) == (code, f"Error: \\x1b[31mmake: {why}\n")
