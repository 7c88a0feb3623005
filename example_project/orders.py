"""
The shop's books: one SQLite file of orders, stock, sales and payments.

The orders are loaded from the ``orders.csv`` beside this module, the first time that a file is
opened.  Selling and paying are written the way they should not be, as a read and a later write with
nothing around them: it is the lock of the task that has to make one step of the two.
"""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDERS_CSV = Path(__file__).with_name("orders.csv")
COLUMNS = (
    "order_id",
    "corp_id",
    "corporation",
    "item",
    "quantity",
    "unit_price",
    "ordered_on",
)
BUSY_TIMEOUT = 30.0  # seconds to wait for another process's write
LOADED = 1  # SQLite's user_version of a file that is complete

TABLES = (
    (
        "CREATE TABLE orders (order_id INTEGER PRIMARY KEY, corp_id INTEGER, corporation TEXT, "
        "item TEXT, quantity INTEGER, unit_price TEXT, ordered_on TEXT)"
    ),
    "CREATE INDEX orders_of_corporation ON orders (corp_id)",
    "CREATE TABLE stock (item_id TEXT PRIMARY KEY, pieces INTEGER)",
    "CREATE TABLE sales (item_id TEXT, customer TEXT)",
    "CREATE TABLE payments (customer_id INTEGER, number INTEGER, amount INTEGER, balance INTEGER)",
)


class Books:
    """
    The orders, stock, sales and payments in one folder.

    Every method opens the file anew: a task may run in any process or thread.

    Args:
        folder: Where ``shop.sqlite`` is, or will be; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "shop.sqlite"

    def corporations(self) -> list[int]:
        """Return the ids of all corporations that ever ordered."""
        with self._transaction() as books:
            return [
                row[0] for row in books.execute("SELECT DISTINCT corp_id FROM orders ORDER BY 1")
            ]

    def orders_of(self, corp_id: int) -> list[tuple[str, ...]]:
        """Return a corporation's orders as an export shows them, oldest first."""
        with self._transaction() as books:
            rows = books.execute(
                "SELECT order_id, corp_id, corporation, item, quantity, unit_price, ordered_on "
                "FROM orders WHERE corp_id = ? ORDER BY order_id",
                (corp_id,),
            )
            return [tuple(map(str, row)) for row in rows]

    def put_on_sale(self, item_id: str, pieces: int) -> None:
        """Set the stock of an item, and forget what was sold of it before."""
        with self._transaction() as books:
            books.execute("DELETE FROM sales WHERE item_id = ?", (item_id,))
            books.execute("INSERT OR REPLACE INTO stock VALUES (?, ?)", (item_id, pieces))

    def stock_of(self, item_id: str) -> int:
        """Return how many pieces are left; 0 of an item that was never put on sale."""
        with self._transaction() as books:
            row = books.execute("SELECT pieces FROM stock WHERE item_id = ?", (item_id,)).fetchone()
            return row[0] if row else 0

    def record_sale(self, item_id: str, customer: str, left: int) -> None:
        """Write a sale, and as the new stock whatever the seller believes is *left*."""
        with self._transaction() as books:
            books.execute("INSERT INTO sales VALUES (?, ?)", (item_id, customer))
            books.execute("UPDATE stock SET pieces = ? WHERE item_id = ?", (left, item_id))

    def sold(self, item_id: str) -> int:
        """Count the pieces sold."""
        with self._transaction() as books:
            rows = books.execute("SELECT COUNT(*) FROM sales WHERE item_id = ?", (item_id,))
            count: int = rows.fetchone()[0]
            return count

    def balance_of(self, customer_id: int) -> int:
        """Return what a customer's last payment left; 0 before the first."""
        statement = self.statement_of(customer_id)
        return statement[-1][2] if statement else 0

    def record_payment(self, customer_id: int, number: int, amount: int, balance: int) -> None:
        """Write a payment, and as the new balance whatever the caller believes it is."""
        with self._transaction() as books:
            books.execute(
                "INSERT INTO payments VALUES (?, ?, ?, ?)", (customer_id, number, amount, balance)
            )

    def statement_of(self, customer_id: int) -> list[tuple[int, int, int]]:
        """Return number, amount and balance of a customer's payments, as they were booked."""
        with self._transaction() as books:
            rows = books.execute(
                "SELECT number, amount, balance FROM payments WHERE customer_id = ? ORDER BY rowid",
                (customer_id,),
            )
            return list(rows)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with closing(
            sqlite3.connect(self._file, timeout=BUSY_TIMEOUT, isolation_level=None)
        ) as books:
            if not _is_loaded(books):
                _load(books)
            with books:
                books.execute("BEGIN")
                yield books


def _is_loaded(books: sqlite3.Connection) -> bool:
    version: int = books.execute("PRAGMA user_version").fetchone()[0]
    return version == LOADED


def _load(books: sqlite3.Connection) -> None:
    """Fill a new file.  Of many processes that come first, one does it and the others wait."""
    with books:
        books.execute("BEGIN IMMEDIATE")
        if _is_loaded(books):
            return
        for statement in TABLES:
            books.execute(statement)
        with ORDERS_CSV.open(newline="", encoding="utf-8") as source:
            books.executemany(
                "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?)",
                ([row[column] for column in COLUMNS] for row in csv.DictReader(source)),
            )
        books.execute(f"PRAGMA user_version = {LOADED}")
