"""``celery dislock top`` on a real server, and in a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

from celery_dislock.servers.store import Store
from tests.holding import wait_for

LONG = 1000.0  # seconds
HOSTILE = "[red]x[/red]\x1b[31m"
PROGRAM = """
import signal
from types import SimpleNamespace
from celery import Celery
from celery_dislock.operating.cli import dislock
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
app = Celery("shop", broker={url!r})
dislock(["top", "--interval", "0.1"], obj=SimpleNamespace(app=app))
"""


@pytest.fixture
def held(redis_url):
    """The URL of a server with a lock that is held."""
    store = Store(redis_url)
    holder = json.dumps({"task": "shop.export", "id": "id-1", "worker": "w1@here", "pid": 7})
    store.acquire([f"dislock:{{{HOSTILE}}}"], "o", LONG, holder)
    store.close()
    return redis_url


def test_a_terminal_is_refreshed_until_ctrl_c(held):
    """It shows the locks again and again, and leaves the terminal as it was."""
    typed, shown = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(url=held)],
        stdin=shown,
        stdout=shown,
        stderr=shown,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "12"},
    )
    os.close(shown)
    text = b""

    def read():
        nonlocal text
        if select.select([typed], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # it has ended
                text += os.read(typed, 65536)
        return text

    try:
        wait_for(lambda: read().count(b"held 1") >= 3, "three screens")
        program.send_signal(signal.SIGINT)
        wait_for(lambda: read() and program.poll() is not None, "its end")
    finally:
        program.kill()
        os.close(typed)
    assert program.wait() == 0
    assert b"[red]x[/red]" in text
    assert b"\x1b[31m" not in text  # the key's own escape
