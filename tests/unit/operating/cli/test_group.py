"""The group of the commands: its help, and the encoding of what they write."""

from __future__ import annotations

from types import SimpleNamespace

import click
import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock.operating.cli import dislock
from celery_dislock.operating.locks import AppLocks
from tests.pages import FakeOverview, holder, lock

COLUMNS = 80


@pytest.mark.parametrize("width", [40, COLUMNS, 200])
def test_the_help_of_no_command_is_cut(width):
    """Each command is described by a whole sentence, which is a line of 80 columns."""
    shown = CliRunner().invoke(dislock, ["--help"], terminal_width=width).stdout
    words = " ".join(shown.split())
    assert "..." not in words.partition("Commands:")[2]
    for name, command in dislock.commands.items():
        short = command.get_short_help_str()
        assert short.endswith("."), name
        assert f"{name} {' '.join(short.split())}" in words
        assert len(short) <= COLUMNS - len("  put-back  "), name
        assert isinstance(command, click.Command)


def test_an_encoding_without_a_key_s_characters_ends_no_command(monkeypatch):
    """They are written as Python writes them."""
    overview = FakeOverview()
    overview.put(lock("\u4e2d", holders=[holder()]))
    monkeypatch.setattr(AppLocks, "overview", overview)
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = "redis://nobody/0"
    answer = CliRunner(charset="latin-1").invoke(dislock, ["ls"], obj=SimpleNamespace(app=app))
    assert answer.exit_code == 0
    assert "\\u4e2d" in answer.stdout
