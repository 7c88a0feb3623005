"""The command that serves the page: what it refuses to do, and who may do what there."""

import gc
import socket
import sys
from types import SimpleNamespace

import pytest

from celery_dislock.operating.cli import web
from celery_dislock.operating.cli.web import _port_of
from tests.commands import FOUND, USAGE
from tests.pages import Visitor


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--host", "0.0.0.0"], "--allow-host"),  # noqa: S104
        (["--port", "70000"], "--port"),
        (["--allow-host", "ops.example.com:80"], "--allow-host ops.example.com:80: give the name"),
        (["--allow-host", "https://ops.example.com"], "give the name alone"),
    ],
)
def test_what_cannot_be_served_is_refused(dislock, args, named):
    """The error names the option that is missing or wrong."""
    done = dislock("web", *args)
    assert done.exit_code == USAGE
    assert named in done.output


def test_without_a_server_the_error_names_the_extra(dislock, monkeypatch):
    """The package itself needs none."""
    monkeypatch.setitem(sys.modules, "waitress.server", None)
    done = dislock("web")
    assert done.exit_code == USAGE
    assert 'pip install "celery-dislock[web]"' in done.output


NAMED = ("--allow-host", "ops.example.com")


@pytest.mark.parametrize(
    ("args", "shows_token", "is_free", "start"),
    [
        ([], False, True, "http://127.0.0.1:8765/"),
        (["--allow-actions"], True, True, "http://127.0.0.1:8765/?token="),
        (["--host", "::1"], False, True, "http://[::1]:8765/"),
        (["--url-prefix", "locks/"], False, True, "http://127.0.0.1:8765/locks/"),
        (NAMED, True, False, "http://127.0.0.1:8765/?token="),
        (["--trusted-proxy", "10.0.0.1"], True, False, "http://127.0.0.1:8765/?token="),
        (["--host", "0.0.0.0", *NAMED], True, False, "http://ops.example.com:8765/?token="),  # noqa: S104
    ],
    ids=str,
)
def test_the_token_is_shown_if_it_is_needed(
    dislock, monkeypatch, args, shows_token, is_free, start
):
    """On this machine one reads without it, unless there may be a proxy."""
    served, printed = [], []
    monkeypatch.setattr("waitress.server.create_server", lambda *page, **_: served.append(*page))
    monkeypatch.setattr(web, "_run", lambda _server, address: printed.append(address))
    assert dislock("web", *args).exit_code == 0
    assert printed[0].startswith(start)
    assert ("token=" in printed[0]) is shows_token
    assert (Visitor(served[0]).get("/metrics").status_code != 403) is is_free


@pytest.mark.parametrize(
    "server",
    [
        SimpleNamespace(effective_port=8766),
        SimpleNamespace(effective_listen=[("127.0.0.1", 8766), ("::1", 8767)]),
    ],
)
def test_the_port_that_was_taken_is_known_for_each_kind_of_server(server):
    """The name localhost may have two addresses, and then a free port for each of them."""
    assert _port_of(server) == 8766


@pytest.mark.filterwarnings("ignore:unclosed")  # by waitress
def test_a_port_that_is_taken_is_told(dislock):
    """The exit code is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = dislock("web", "--port", str(port))
    assert done.exit_code == FOUND
    assert f"Error: cannot listen at 127.0.0.1:{port}: [Errno 98]" in done.output
    del done
    gc.collect()
