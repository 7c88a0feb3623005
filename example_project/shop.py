"""
The shop's Celery app and its tasks.

Run a worker with ``celery -A example_project.shop worker --dislock``.  Settings come from the
environment:

=========================  ==========================  ============================================
variable                   default                     meaning
=========================  ==========================  ============================================
``SHOP_BROKER_URL``        redis://localhost:6379/0    broker, and so the lock server
``SHOP_RESULT_BACKEND``    the broker                  where results go
``SHOP_FOLDER``            demo-output/shop            books and exported files
``SHOP_TIMELINE``          (none recorded)             file of events, see ``timeline.py``
``SHOP_WATCHDOG_TIMEOUT``  30                          seconds until a lock that is not renewed ends
``SHOP_ROW_PAUSE``         0.1                         seconds that a row of an export takes
``SHOP_BUY_PAUSE``         0.1                         seconds between reading and writing stock
``SHOP_PAYMENT_PAUSE``     0.5                         seconds that a payment takes
``SHOP_REINDEX_PAUSE``     3                           seconds that a reindexing takes
``SHOP_MAX_RENEW_TIMES``   5                           cap of ``runaway``
=========================  ==========================  ============================================

They stand in ``app.conf`` under the same names in lower case, the watchdog's as
``dislock_watchdog_timeout``.
"""

from __future__ import annotations

import csv
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_dislock import Dislock, LockHeldError, SingletonTask
from example_project import timeline
from example_project.orders import COLUMNS, Books

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery import Task

MAX_RENEW_TIMES = int(os.environ.get("SHOP_MAX_RENEW_TIMES", "5"))
RUNAWAY_STEP = 0.05  # seconds


def settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the app's configuration from the environment, or from something like it."""
    broker = environ.get("SHOP_BROKER_URL", "redis://localhost:6379/0")
    return {
        "broker_url": broker,
        "broker_connection_retry_on_startup": True,
        "dislock_watchdog_timeout": float(environ.get("SHOP_WATCHDOG_TIMEOUT", "30")),
        "result_backend": environ.get("SHOP_RESULT_BACKEND", broker),
        "shop_buy_pause": float(environ.get("SHOP_BUY_PAUSE", "0.1")),
        "shop_folder": environ.get("SHOP_FOLDER", "demo-output/shop"),
        "shop_payment_pause": float(environ.get("SHOP_PAYMENT_PAUSE", "0.5")),
        "shop_reindex_pause": float(environ.get("SHOP_REINDEX_PAUSE", "3")),
        "shop_row_pause": float(environ.get("SHOP_ROW_PAUSE", "0.1")),
        "worker_prefetch_multiplier": 1,  # no click waits behind an export while a slot is free
    }


app = Celery("shop", **settings(os.environ))
dislock = Dislock(app)

if "SHOP_TIMELINE" in os.environ:
    timeline.record_to(Path(os.environ["SHOP_TIMELINE"]))


@app.task(base=SingletonTask, bind=True, lock_key="export:<corp_id>")
def export(self: Task, corp_id: int) -> int:
    """
    Write a corporation's orders to ``corp-<corp_id>.csv``, row by row.

    Two at a time would write over each other, as they share the unfinished file's name.

    Returns:
        The number of rows.
    """
    folder = shop_folder()
    books = Books(folder)
    unfinished = folder / f"corp-{corp_id}.csv.part"
    with (
        timeline.running(self, f"export:{corp_id}"),
        alone(f"export-{corp_id}"),
        unfinished.open("w", newline="", encoding="utf-8") as target,
    ):
        writer = csv.writer(target)
        writer.writerow(COLUMNS)
        rows = books.orders_of(corp_id)
        for row in rows:
            writer.writerow(row)
            target.flush()
            time.sleep(app.conf.shop_row_pause)
        unfinished.replace(folder / f"corp-{corp_id}.csv")
    return len(rows)


# No SingletonTask: in a worker with --dislock, a lock_key is all that it takes.
@app.task(bind=True, lock_key="stock:<item_id>", lock_on_conflict="raise", throws=(LockHeldError,))
def buy(self: Task, item_id: str, customer: str) -> str:
    """Sell one piece; a customer who comes while another buys is told so by LockHeldError."""
    return sell(self, item_id, customer)


@app.task(bind=True)
def buy_without_lock(self: Task, item_id: str, customer: str) -> str:
    """Sell one piece, and do not look who else is selling."""
    return sell(self, item_id, customer)


# One place in line, and the oldest makes room: all that come while one runs share one run after it.
@app.task(
    base=SingletonTask,
    bind=True,
    lock_key="reindex:<shelf>",
    lock_on_conflict="queue",
    lock_queue_limit=1,
    lock_queue_overflow="replace",
)
def reindex(self: Task, shelf: str, edition: int) -> int:
    """
    Write the search index of a shelf, slowly, from the edition of it that the caller has seen.

    Returns:
        The edition.
    """
    folder = shop_folder()
    unfinished = folder / f"index-{shelf}.txt.part"
    with timeline.running(self, f"reindex:{shelf}"), alone(f"reindex-{shelf}"):
        unfinished.write_text(f"{edition}\n", "utf-8")
        time.sleep(app.conf.shop_reindex_pause)
        with suppress(FileNotFoundError):  # where another reindexing was not kept out
            unfinished.replace(folder / f"index-{shelf}.txt")
    return edition


@app.task(base=SingletonTask, bind=True, lock_key="account:<customer_id>", lock_on_conflict="queue")
def apply_payment(self: Task, customer_id: int, number: int, amount: int) -> int | str:
    """
    Book a payment on a customer's account: in, or out where the amount is below 0.

    Order matters: what the account does not cover bounces.

    Returns:
        The new balance; or "bounced".
    """
    with timeline.running(self, f"account:{customer_id}"):
        books = Books(shop_folder())
        balance = books.balance_of(customer_id) + amount
        time.sleep(app.conf.shop_payment_pause)
        if balance < 0:
            return "bounced"
        books.record_payment(customer_id, number, amount, balance)
        return balance


@app.task(
    base=SingletonTask,
    bind=True,
    lock_key="runaway",
    max_renew_times=MAX_RENEW_TIMES,
    lock_on_cap="raise",
)
def runaway(self: Task) -> None:
    """Never end: only the cap of its lock stops it."""
    with timeline.running(self, "runaway"):
        while True:
            time.sleep(RUNAWAY_STEP)


def sell(task: Task, item_id: str, customer: str) -> str:
    """Read the stock, think, and write it back: right only for one seller at a time."""
    with timeline.running(task, f"stock:{item_id}"):
        books = Books(shop_folder())
        pieces = books.stock_of(item_id)
        if not pieces:
            return "sold out"
        time.sleep(app.conf.shop_buy_pause)
        books.record_sale(item_id, customer, left=pieces - 1)
        return "sold"


@contextmanager
def alone(what: str) -> Iterator[None]:
    """
    Note in ``overlaps.txt`` where somebody else is in here for the same thing; stops nobody.

    The witness that the locks are checked against, so it has nothing to do with them: the kernel
    keeps it, and drops it when a process dies.
    """
    folder = shop_folder()
    with (folder / f"{what}.witness").open("w") as witness:
        try:
            fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (folder / "overlaps.txt").open("a", encoding="utf-8") as overlaps:
                overlaps.write(f"{what}\n")
        yield


def edition_of_index(shelf: str) -> int:
    """Return the edition that a shelf's search index was made from; 0 where there is none."""
    index = shop_folder() / f"index-{shelf}.txt"
    return int(index.read_text("utf-8")) if index.exists() else 0


def overlaps() -> list[str]:
    """Return what :func:`alone` has noted."""
    noted = shop_folder() / "overlaps.txt"
    return noted.read_text("utf-8").splitlines() if noted.exists() else []


def shop_folder() -> Path:
    """Return the folder of the books and the exported files; made if it is not there."""
    folder = Path(app.conf.shop_folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
