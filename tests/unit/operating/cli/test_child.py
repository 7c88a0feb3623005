"""How signals reach a command, and how it is ended."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from celery_dislock.operating.cli import child as module
from celery_dislock.operating.cli.child import CANNOT_RUN, NOT_FOUND, Child

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
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_args, **_kwargs: process)
    monkeypatch.setattr(os, "killpg", lambda pid, number: process.sent.append((pid, number)[1]))
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    return process


def test_signals_are_passed_on_and_the_handlers_put_back(process):
    """While the command runs; after it they are ours again."""
    before = signal.getsignal(signal.SIGTERM)
    with Child() as child:
        assert child.start(["it"], {}) == 0
        for name in module.PASSED_ON:
            signal.raise_signal(getattr(signal, name))
        assert child.wait(lambda: True, 5.0) == 0
    assert process.sent == [getattr(signal, name) for name in module.PASSED_ON]
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

    monkeypatch.setattr(module.subprocess, "Popen", popen)
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
    ("error", "code"),
    [
        (FileNotFoundError(), NOT_FOUND),
        (PermissionError(), CANNOT_RUN),
        (OSError(8, "x"), CANNOT_RUN),
    ],
)
def test_what_cannot_be_started(monkeypatch, error, code):
    """The codes are those of a shell."""

    def popen(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    with Child() as child:
        assert child.start(["it"], {}) == code
