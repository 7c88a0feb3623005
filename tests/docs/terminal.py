"""Terminals and a Python prompt: what the reader of a page has beside it."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.forked import start, template

LIMIT = 60.0  # seconds for a command to end, or for a line to appear
POLL = 0.02  # seconds between two looks
END = "<ended>"
ANYTHING = "…"  # in the output that a page shows: any text; alone on a line, any lines
CELERY = str(Path(sys.executable).with_name("celery"))
PROMPT = Path(__file__).with_name("prompt.py")
CHANGES = re.compile(r"(export|cd|\.) ")  # what the commands after it find
OF_THE_SHELL = re.compile(r"[|&;<>$*]")


def pattern_of(shown):
    """Return what the output has to match that a page shows."""
    lines = []
    for line in shown:
        if line.strip() == ANYTHING:
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(
                ".*".join(re.escape(part) for part in line.rstrip().split(ANYTHING)) + r"\s*?\n"
            )
    return re.compile("".join(lines))


class Terminal:
    """
    A shell in a folder.  What is printed in it is read by a thread of its own.

    ``celery`` is started beside the shell, by a fork that has imported it.
    """

    def __init__(self, folder, environment):
        self._folder, self._environment = folder, environment
        shown, self._screen = os.pipe()
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._screen,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._is_as_made = True
        self._programs = []
        self._printed = []
        self._reader = threading.Thread(target=self._read, args=(shown,), daemon=True)
        self._reader.start()

    def _read(self, shown):
        with os.fdopen(shown) as lines:
            self._printed.extend(iter(lines.readline, ""))

    def _start(self, command):
        """Start a command beside the shell; None if the shell has to do it."""
        if CHANGES.match(command):
            self._is_as_made = False
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        if not self._is_as_made or words[0] != "celery" or OF_THE_SHELL.search(command):
            return None
        out = self._screen
        self._programs.append(start(CELERY, words[1:], self._folder, self._environment, out, out))
        return self._programs[-1]

    def _type(self, line):
        assert self._shell.stdin is not None
        self._shell.stdin.write(line + "\n")
        self._shell.stdin.flush()

    def run(self, command):
        """Type a command, and return its exit status and output when it has ended."""
        begin = len(self._printed)
        if program := self._start(command):
            command = f"(exit {program.wait(LIMIT)})"
        self._type(f"{command}\necho '{END}' $?")
        self._wait(lambda: any(END in line for line in self._printed[begin:]), command)
        output = "".join(self._printed[begin:])
        before, _, status = output.rpartition(END)
        return int(status), before

    def start(self, command, shown):
        """Type a command and leave it running; wait until it has printed what a page shows."""
        begin = len(self._printed)
        if not self._start(command):
            self._type(command)
        self._wait(lambda: self.has(shown, begin), "\n".join(shown))

    def _wait(self, condition, what):
        give_up = time.monotonic() + LIMIT
        while not condition():
            assert self._shell.poll() is None, f"the shell has ended:\n{''.join(self._printed)}"
            assert time.monotonic() < give_up, f"{what!r} is not there:\n{''.join(self._printed)}"
            time.sleep(POLL)

    @property
    def printed(self):
        """All that was printed so far."""
        return "".join(self._printed)

    def interrupt(self, number=signal.SIGINT):
        """Type Ctrl-C, and wait for the shell's prompt."""
        for process in self._processes():
            _send(process, number)
        give_up = time.monotonic() + LIMIT
        while self._processes() and time.monotonic() < give_up:
            time.sleep(POLL)

    def has(self, shown, begin=0):
        """Tell whether these lines have been printed, in this order, others between them or not."""
        lines = iter(self._printed[begin:])
        wanted = [pattern_of([line]) for line in shown if line.strip() != ANYTHING]
        return all(any(want.fullmatch(line) for line in lines) for want in wanted)

    def close(self):
        """End what runs in it, as closing its window does, and make sure of it."""
        self.interrupt(signal.SIGTERM)
        for process in self._processes():
            _send(process, signal.SIGKILL)
        self._shell.kill()
        for program in (self._shell, *self._programs):
            program.wait()
        os.close(self._screen)
        self._reader.join()
        assert self._shell.stdin is not None
        self._shell.stdin.close()

    def _processes(self):
        """Return the processes of the terminal, without the shell."""
        sessions = {self._shell.pid, *(program.pid for program in self._programs)}
        found = []
        for about in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                after_name = about.read_text("utf-8", "replace").rpartition(")")[2]
                state, _parent, _group, session, *_ = after_name.split()
                if int(session) in sessions and state != "Z":
                    found.append(int(about.parent.name))
        return [pid for pid in found if pid != self._shell.pid]


def _send(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


class Prompt:
    """A Python that runs the snippets of one page, one after the other."""

    def __init__(self, python, folder, environment):
        asked, ask = os.pipe()
        answer, answered = os.pipe()
        if str(python) == sys.executable and sys.platform == "linux":
            self._python = template.start(
                str(PROMPT), [], folder=folder, env=environment, stdin=asked, out=answered, err=2
            )
        else:
            self._python = subprocess.Popen(
                [python, PROMPT], cwd=folder, env=environment, stdin=asked, stdout=answered
            )
        os.close(asked)
        os.close(answered)
        self._ask, self._answers = os.fdopen(ask, "w"), os.fdopen(answer)

    def run(self, language, code, line, page):
        """Run a snippet; return what is wrong with it, or ""."""
        asked = {"language": language, "code": code, "line": line, "page": str(page)}
        self._ask.write(json.dumps(asked) + "\n")
        self._ask.flush()
        answer = self._answers.readline()
        assert answer, f"Python ended in line {line} of {page.name}"
        return json.loads(answer)

    def close(self):
        """End it."""
        self._ask.close()
        try:
            self._python.wait(LIMIT)
        finally:
            self._python.kill()
            self._python.wait()
            self._answers.close()
