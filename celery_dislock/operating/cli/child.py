"""A command that runs as a child of this process, in a process group of its own.

What the command starts is in its group, so all of it gets the signals and is ended with it.  The
group has no terminal of its own: Ctrl-C reaches this process, which passes it on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
STOP = {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"}  # of these, what ends us while there is no child
LOOK_EVERY = 0.1  # seconds

CANNOT_RUN, NOT_FOUND = 126, 127  # exit codes, as in shells
BY_SIGNAL = 128  # plus the signal's number


class Child:
    """
    Passes signals on to a command.  A context manager; for the main thread.

    A signal that comes before the command has begun ends this process, with SystemExit.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._came: list[int] = []  # while the command was started
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in PASSED_ON:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._got)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _got(self, number: int, _frame: object) -> None:
        if self._process is not None:
            self._send(number)
        elif self._starting:
            self._came.append(number)
        elif signal.Signals(number).name in STOP:
            raise SystemExit(BY_SIGNAL + number)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """
        Start the command.

        Args:
            command: The program and its arguments; no shell reads them.
            environment: Variables beside those of this process.

        Returns:
            0, or the exit code of a command that could not be started.
        """
        self._starting = True
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- it is what the command is for
                command, env={**os.environ, **environment}, start_new_session=True
            )
        except FileNotFoundError:
            return NOT_FOUND
        except OSError:
            return CANNOT_RUN
        finally:
            self._starting = False
        for number in self._came:
            self._send(number)
        return 0

    def wait(self, goes_on: Callable[[], bool], grace: float) -> int:
        """
        Wait until the command has ended; end it when it must not go on.

        Args:
            goes_on: Asked all the time; False: the command gets TERM.
            grace: Seconds from TERM until KILL.

        Returns:
            Its exit code; 128 + n if signal n has ended it.
        """
        assert self._process is not None  # noqa: S101 -- it was started
        kill_at = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK_EVERY)
                if kill_at is not None:
                    self._send(signal.SIGKILL)  # what it has left behind in its group
                return code if code >= 0 else BY_SIGNAL - code
            if kill_at is None and not goes_on():
                self._send(signal.SIGTERM)
                kill_at = time.monotonic() + grace
            elif kill_at is not None and time.monotonic() >= kill_at:
                self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
