"""What a terminal is shown, and how errors end a command."""

from __future__ import annotations

import json

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.cli.session import AWAY, FOUND, write_json, write_table
from tests.unit.operating.cli.conftest import lock


def test_columns_stand_below_each_other(capsys):
    """Each is as wide as its widest cell; no line ends in spaces, none is broken by a cell."""
    write_table({"A": lambda a, _: a, "B": lambda _, b: b}, [("one", "1"), ("\n{x}", 22), ("", 0)])
    assert capsys.readouterr().out == "A      B\none    1\n\\n{x}  22\n-      -\n"


def test_json_can_be_shown(capsys):
    """Text of a stranger is escaped, and is the same when it is read; NaN becomes null."""
    write_json({"key": "\x1b\u202e", "held": float("nan")})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"key": "\x1b\u202e", "held": None}


def test_errors_have_their_exit_codes(dislock, overview):
    """A server that is away is no finding, and a damaged lock is one."""
    overview.put(lock("k"))
    overview.known["dislock:{k}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{k}")
    answer = dislock("show", "k")
    assert answer.exit_code == FOUND
    assert "cannot be used: wrong type" in answer.stderr
    overview.error = StoreError("redis://fake", "away")
    answer = dislock("show", "k")
    assert (answer.exit_code, answer.stderr) == (AWAY, "Error: lock server redis://fake: away\n")


def test_an_app_without_a_lock_server_is_told_what_to_give(dislock):
    """The error names the two ways."""
    dislock.app.conf.dislock_url = None
    answer = dislock("drop", "t", "--yes")
    assert answer.exit_code == 2
    assert "Name the app" in answer.stderr
    assert "--dislock-url" in answer.stderr
