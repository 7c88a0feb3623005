"""What a terminal is shown, and how errors end a command."""

from __future__ import annotations

import json

import pytest

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.cli.session import (
    AWAY,
    FOUND,
    write_json,
    write_json_rows,
    write_table,
)
from tests.unit.operating.cli.conftest import lock


def test_columns_stand_below_each_other(capsys):
    """Each is as wide as its widest cell; no line ends in spaces, none is broken by a cell."""
    write_table(("A", "B"), [("one", "1"), ("\n{x}", 22)])
    assert capsys.readouterr().out == "A      B\none    1\n\\n{x}  22\n"


def test_json_has_no_number_that_json_does_not_have(capsys):
    """What is not a number is null, whichever way it came there."""
    write_json({"a": float("nan")})
    write_json_rows([{"a": float("inf")}])
    assert capsys.readouterr().out == '{\n  "a": null\n}\n[{"a": null}]\n'


def test_json_can_be_shown(capsys):
    """Text of a stranger is escaped, and is the same when it is read."""
    write_json({"key": "\x1b\u202e"})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"key": "\x1b\u202e"}


@pytest.mark.parametrize("rows", [[], [{"a": "\x1b"}], [1, 2]])
def test_a_list_in_json_has_a_line_for_each(capsys, rows):
    """It is a list all the same."""
    write_json_rows(rows)
    printed = capsys.readouterr().out
    assert json.loads(printed) == rows
    assert len(printed.splitlines()) == max(1, len(rows))


def test_errors_have_their_exit_codes(dislock, overview):
    """A server that is away is no finding, and a damaged lock is one."""
    overview.put(lock("k"))
    overview.there["dislock:{k}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{k}")
    answer = dislock("show", "k")
    assert answer.exit_code == FOUND
    assert "cannot be used: wrong type" in answer.stderr
    overview.away = True
    answer = dislock("show", "k")
    assert (answer.exit_code, answer.stderr) == (AWAY, "Error: lock server redis://fake: away\n")


def test_an_app_without_a_lock_server_is_told_what_to_give(dislock):
    """The error names the two ways."""
    dislock.app.conf.dislock_url = None
    answer = dislock("drop", "t", "--yes")
    assert answer.exit_code == 2
    assert "Name the app" in answer.stderr
    assert "--dislock-url" in answer.stderr
