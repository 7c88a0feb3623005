"""The command that serves the page: what it refuses to do, and how it writes passwords."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from celery_dislock.operating.cli.group import dislock
from celery_dislock.operating.web.login import LoginFile


@pytest.fixture
def command(app):
    """Run the command with these options."""

    def run(*args, **options):
        context = SimpleNamespace(app=app)
        return CliRunner().invoke(dislock, ["web", *args], obj=context, **options)

    return run


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--allow-actions"], "--login-file"),
        (["--host", "0.0.0.0"], "--login-file"),  # noqa: S104 -- refused
        (["--host", "0.0.0.0", "--read-without-login"], "--allow-host"),  # noqa: S104
        (["--login-file", "/nowhere/users"], "No such file"),
        (["--set-password", "ann"], "--login-file"),
        (["--port", "70000"], "--port"),
    ],
)
def test_what_would_be_open_to_everybody_is_refused(command, args, told):
    """The error names the option that is missing."""
    done = command(*args)
    assert done.exit_code == 2
    assert told in done.output


def test_a_password_is_asked_for_and_written(command, tmp_path):
    """It is not shown, and the user can log in with it."""
    path = tmp_path / "users"
    args = ("--login-file", str(path), "--set-password", "ann")
    done = command(*args, input="correct horse\ncorrect horse\n")
    assert done.exit_code == 0
    assert done.output.endswith(f"{path}: ann can log in with this password.\n")
    assert "correct horse" not in done.output
    assert LoginFile(path)("ann", "correct horse")
    assert command(*args, input="short\nshort\n").exit_code == 2


def test_without_a_server_the_error_names_the_extra(command, monkeypatch):
    """The package itself needs none."""
    monkeypatch.setitem(sys.modules, "waitress.server", None)
    done = command()
    assert done.exit_code == 2
    assert 'pip install "celery-dislock[web]"' in done.output
