"""Start ``python -m celery`` at the cost of a fork.

A worker takes a second of processor time to start, nearly all of it for imports, and the tests
start hundreds.  So each test process has a template: a process that has imported Celery and the
package, and has made no app.  It forks itself for each program that is asked for; the fork then
runs the module as ``python -m`` does, with the arguments, environment and folder that were given.
Programs that patch modules before they are imported (gevent, eventlet) need a real start.

A program lives in a session of its own.  It is no child of ours, so the template tells when it has
ended; :class:`Forked` has the part of ``subprocess.Popen`` that tests use.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("celery.__main__", "celery.apps.worker", "celery.backends.redis", "celery.bin.celery"),
    *("celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread"),
    *("celery.fixups.django", "celery.loaders.app", "celery.utils.static"),
    *("celery.worker.autoscale", "celery.worker.components", "celery.worker.consumer"),
    *("kombu.transport.redis", "redis.asyncio"),
)
OTHER_RELEASE = "OTHER_RELEASE"  # in the environment: Python's path begins with one
# Pools that patch modules before these are imported, and one that Celery looks for at its import.
PATCHING = {"gevent", "eventlet", "custom"}
LONGEST = 1 << 20  # bytes of a request
TIMEOUT = 60.0  # seconds in which the template answers


class Request(NamedTuple):
    """A program to start."""

    module: str
    arguments: list[str]
    folder: str
    env: dict[str, str]


class Forked:
    """A program that the template has started."""

    def __init__(self, args, pid, status):
        self.args = args
        self.pid = pid
        self.returncode = None
        self._status = status  # a pipe: the return code, when it has ended
        self._reading = threading.Lock()

    def poll(self):
        """Return the return code; None while the program runs."""
        return self._read(0)

    def wait(self, timeout=None):
        """Wait for the end of the program."""
        if self._read(timeout) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number):
        """Send a signal, if the program still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout):
        with self._reading:
            if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
                told = os.read(self._status, 16)
                os.close(self._status)
                self.returncode = int(told) if told else -signal.SIGKILL  # the template is dead
        return self.returncode


class Template:
    """The process that forks, started when it is first needed."""

    def __init__(self):
        self._process = None
        self._asking = threading.Lock()

    def start(self, module, arguments, *, folder, env, out, err, stdin=None):
        """Run ``python -m MODULE ARGUMENTS`` with these files; a script's path is no module."""
        request = Request(module, list(arguments), str(folder), dict(env))
        status, told = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, told)
            if stdin is None:
                stdin = os.open(os.devnull, os.O_RDONLY)
                stack.callback(os.close, stdin)
            with self._asking:
                talk = self._connected()
                socket.send_fds(talk, [json.dumps(request).encode()], [stdin, out, err, told])
                pid = int(talk.recv(16))
        return Forked([module, *arguments], pid, status)

    def stop(self):
        """End the template; what it has started goes on."""
        if self._process is not None:
            self._talk.close()
            self._process.wait()
            self._process = None

    def _connected(self):
        if self._process is None:
            self._talk, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._talk.settimeout(TIMEOUT)
            with its:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__], cwd=ROOT, stdin=its, start_new_session=True
                )
            atexit.register(self.stop)
        return self._talk


template = Template()


def start_celery(arguments, folder, env, log_file):
    """Run ``python -m celery`` with these arguments, in that folder, with its output to a file."""
    with log_file.open("wb") as log:
        return start("celery", arguments, folder, env, log.fileno(), log.fileno())


def run_python(module, *arguments, folder, env, timeout=TIMEOUT):
    """Run ``python -m MODULE ARGUMENTS`` to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = start(module, arguments, folder, env, out.fileno(), err.fileno())
        try:
            returncode = program.wait(timeout)
        finally:
            program.kill()
        out.seek(0)
        err.seek(0)
        args = [module, *arguments]
        return subprocess.CompletedProcess(args, returncode, out.read(), err.read())


def start(module, arguments, folder, env, out, err):
    """Start ``python -m MODULE ARGUMENTS``, by a fork if it can be one."""
    is_other = OTHER_RELEASE in env  # which the template has not imported
    if sys.platform == "linux" and not (PATCHING & set(arguments) or is_other):
        return template.start(module, arguments, folder=folder, env=env, out=out, err=err)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def serve(talk):
    """Fork for each request; return the request in the fork, and None when nobody asks any more."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running = {}
    while True:
        ready, _, _ = select.select([talk, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            tell_ended(running)
        if talk not in ready:
            continue
        text, ends, _, _ = socket.recv_fds(talk, LONGEST, 4)
        if not text:
            return None
        *files, told = ends
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            talk.detach()
            for end in (0, woken, wake, told, *running.values()):
                os.close(end)
            request = Request(*json.loads(text))
            become(request, files)
            return request
        talk.send(b"%d" % pid)
        for file in files:
            os.close(file)
        running[pid] = told


def tell_ended(running):
    """Tell of each program that has ended, with its return code."""
    for pid, told in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(BrokenPipeError):
                os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(running.pop(pid))


def become(request, files):
    """Make this process look as the program does when it is started."""
    os.setsid()
    os.chdir(request.folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # Those of the template may be files, and know that they can be sought in.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.env)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request.folder, *paths, *(path for path in sys.path[1:] if path not in before)]
    sys.argv = [request.module, *request.arguments]
    time.tzset()


def main():
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread would not be there after a fork"
    request = serve(socket.socket(fileno=0))
    if request is not None:
        sys.modules.pop(f"{request.module}.__main__", None)  # else runpy warns of it
        if os.sep in request.module:
            runpy.run_path(request.module, run_name="__main__")
        else:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
