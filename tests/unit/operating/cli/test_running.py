"""A command that runs under a lock: its terms, its exit codes, and how signals reach it."""

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

USAGE, HELD, LOST, CANNOT_RUN, NOT_FOUND = 2, 75, 76, 126, 127


class World:
    """A lock, and a process that ends after some looks, with a code."""

    pid = 77

    def __init__(self):
        self.made = self.started = None
        self.refused = self.lost = False
        self.looks, self.code = 3, 0
        self.error = None  # why the command cannot be started
        self.on_start = lambda: None
        self.sent = []  # signals

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

    def popen(self, command, *, env, start_new_session):
        assert start_new_session
        self.on_start()
        if self.error:
            raise self.error
        self.started = (command, {name: env[name] for name in env if name.startswith("DISLOCK_")})
        return self

    def wait(self, timeout):
        self.looks -= 1
        if self.looks > 0:
            raise subprocess.TimeoutExpired("it", timeout)
        return self.code

    def kill(self, pid, number):
        assert pid == self.pid
        self.sent.append(number)


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(running, "make_lock", world.make)
    monkeypatch.setattr(running.subprocess, "Popen", world.popen)
    monkeypatch.setattr(os, "killpg", world.kill)
    return world


@pytest.mark.parametrize(("code", "told"), [(0, 0), (9, 9), (-9, 137)])
def test_the_command_has_the_lock_in_its_environment(dislock, world, code, told):
    """All words after -- are the command's; its exit code is passed on, as by a shell."""
    world.code = code
    about = {"DISLOCK_KEY": "k", "DISLOCK_TOKEN": "5", "DISLOCK_OWNER": "me"}
    for key in (["k"], ["--", "-k"]):
        assert dislock("run", *key, "--", "make", "--timeout", "it").exit_code == told
        assert world.started == (("make", "--timeout", "it"), about)


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


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (FileNotFoundError(), NOT_FOUND, "not found"),
        (PermissionError(), CANNOT_RUN, "cannot be run"),
        (OSError(8, "x"), CANNOT_RUN, "cannot be run"),
    ],
)
def test_what_cannot_be_started(dislock, world, error, code, why):
    """As a shell tells it."""
    world.error = error
    answer = dislock("run", "k", "--", "\x1b[31mmake")
    assert (answer.exit_code, answer.stderr) == (code, f"Error: \\x1b[31mmake: {why}\n")


def test_the_options_of_a_lock(dislock, world):
    """They are those of Dislock.lock."""
    options = ["--mode", "shared", "--watchdog-timeout", "2m", "--max-renew-times", "5", "--unfair"]
    dislock("run", "k", *options, "--timeout", "0", "--", "make")
    stated = {"lock_mode": "shared", "lock_watchdog_timeout": 120.0, "max_renew_times": 5}
    assert world.made == ("k", stated, {"timeout": 0.0, "fair": False})


def test_the_options_of_a_task_hold_unless_others_are_given(dislock, world):
    """The lock of a task has the task's terms."""
    terms = {"lock_key": ["b", "a"], "lock_limit": 3, "lock_watchdog_timeout": 60}

    @dislock.app.task(base=SingletonTask, name="t", shared=False, **terms)
    def task(): ...

    dislock("run", "--task", "t", "--watchdog-timeout", "90", "--", "make")
    key, stated, _ = world.made
    assert key == ["a", "b"]
    assert (stated["lock_limit"], stated["lock_watchdog_timeout"]) == (3, 90.0)


@pytest.mark.parametrize("args", [["k"], ["k", "--"], ["k", "--timeout", "-1", "--", "make"]])
def test_wrong_usage(dislock, world, args):
    """Nothing is locked."""
    assert (dislock("run", *args).exit_code, world.made) == (USAGE, None)


def test_signals_are_passed_on_and_the_handlers_put_back(world):
    """From when the command is being started until it has ended; after it they are ours again."""
    before = signal.getsignal(signal.SIGTERM)
    numbers = [getattr(signal, name) for name in running.PASSED_ON]
    world.on_start = lambda: signal.raise_signal(signal.SIGTERM)
    with Child() as child:
        assert child.start(["it"], {}) == 0
        assert world.sent == [signal.SIGTERM]
        for number in numbers:
            signal.raise_signal(number)
        assert child.wait(lambda: True, 5.0) == 0
    assert world.sent[1:] == numbers
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_command_ends_us(world):
    """While we wait for the lock; one that ends nobody is ignored."""
    with Child():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit) as told:
            signal.raise_signal(signal.SIGTERM)
    assert (told.value.code, world.sent) == (128 + signal.SIGTERM, [])
