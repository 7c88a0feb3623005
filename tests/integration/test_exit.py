"""What a process still has to tell the lock server when it ends, as after Ctrl-C."""

import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from celery_dislock import Dislock
from celery_dislock.operating.locks import AppLocks, rows
from celery_dislock.operating.web.metrics import Collector
from tests.holding import PATIENCE, name_of, wait_for
from tests.pace import LEASE

ROOT = Path(__file__).parents[2]
KEY = "export:7"
LINE = f"{name_of(KEY)}:line"
WAITERS = 3

# The watchdog is slow, as on a machine that has much to do.
START = """
import asyncio, signal, sys, threading, time
from celery_dislock import Dislock
from celery_dislock.operating.locks import AppLocks, rows
from celery_dislock.operating.web.metrics import Collector
from celery_dislock.exceptions import StoreError
from celery_dislock.servers.store import Store
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have set to ignore
clear = Store.clear
def slowly(*args, **kwargs):
    time.sleep(0.2)
    return clear(*args, **kwargs)
Store.clear = slowly
dislock = Dislock.from_url(sys.argv[1], watchdog_timeout=60)
"""
PROGRAMS = {
    "asyncio": """
async def body():
    async with dislock.async_lock("export:7"):
        pass
async def main():
    await asyncio.gather(*(body() for _ in range(3)))
asyncio.run(main())
""",
    "a loop after another": """
async def body():
    async with dislock.async_lock("export:7"):
        pass
async def main():
    await asyncio.gather(*(body() for _ in range(3)))
try:
    asyncio.run(main())
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGKILL)  # as a server that ends by its signal
""",
    "plain": """
release = Store.release
def lost(*args, **kwargs):
    raise StoreError("redis://", "no reply")
Store.release = lost
def wait():
    try:
        with dislock.lock("export:7", timeout=0.5):
            pass
    except Exception:
        pass
threads = [threading.Thread(target=wait) for _ in range(2)]
for thread in threads:
    thread.start()
with dislock.lock("export:7"):
    pass
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_interrupted_leaves_nobody_in_line(redis_url, redis_client, program):
    """What its watchdog has to clear is sent before the process ends."""
    with Dislock.from_url(redis_url) as dislock, dislock.lock(KEY) as lease:
        with subprocess.Popen(
            [sys.executable, "-c", START + PROGRAMS[program], redis_url],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        ) as process:
            wait_for(lambda: redis_client.zcard(LINE) == WAITERS, "the line")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        assert redis_client.zcard(LINE) == 0, err
        assert [one.token for one in dislock.lock(KEY).holders()] == [lease.token]


def test_a_program_whose_server_is_away_ends_all_the_same(own_redis_server):
    """It does not wait for the server for longer than a second."""
    program = [sys.executable, "-c", START + PROGRAMS["plain"], own_redis_server.url]
    with (
        own_redis_server.client() as client,
        Dislock.from_url(own_redis_server.url) as dislock,
        dislock.lock(KEY),
        subprocess.Popen(program, cwd=ROOT, stderr=subprocess.PIPE) as process,
    ):
        wait_for(lambda: client.zcard(LINE) == WAITERS, "the line")
        own_redis_server.pause()
        try:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        finally:
            own_redis_server.resume()


def test_closing_ends_thread_and_connections(redis_url, redis_client):
    """Fifty that were used and closed leave nothing in this process, or on the server."""
    connections = len(redis_client.client_list())
    threads = threading.active_count()
    for _ in range(50):
        with Dislock.from_url(redis_url) as dislock, dislock.lock(KEY):
            pass
    gc.collect()
    wait_for(lambda: threading.active_count() <= threads, "the end of their threads")
    wait_for(lambda: len(redis_client.client_list()) <= connections, "their disconnection")


@pytest.mark.parametrize("looks", [AppLocks, Collector])
def test_closing_ends_what_commands_page_and_metrics_have_opened(redis_url, redis_client, looks):
    """They read over connections of their own, and live longer than what they were given."""
    before = len(redis_client.client_list())
    with Dislock.from_url(redis_url) as dislock, dislock.lock(KEY):
        looked = looks(dislock)
        if looks is AppLocks:
            assert [one.key for one in rows(looked.overview)] == [KEY]
        else:
            assert list(looked.collect())
        assert len(redis_client.client_list()) > before
    wait_for(lambda: len(redis_client.client_list()) <= before, "their disconnection")


def test_what_is_closed_can_be_used_again(redis_url):
    """It is made anew, its watchdog included."""
    dislock = Dislock.from_url(redis_url, watchdog_timeout=LEASE)
    lock = dislock.lock(KEY)
    for _ in range(2):
        with lock as lease:
            wait_for(lambda lease=lease: lease.renewals, "a renewal")
        dislock.close()
