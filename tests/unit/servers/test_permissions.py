"""What a server's refusals mean; the real ones are in the integration tests."""

from __future__ import annotations

import pytest
import redis

from celery_dislock.exceptions import ForbiddenError
from celery_dislock.servers.connections import store_error
from celery_dislock.servers.permissions import check_rights


class Server:
    """Answers commands, and lets scripts run none but those that end well.

    Args:
        replies: What it answers to EVAL: the texts of errors, by command.
        errors: What it refuses by itself, by command.
    """

    name = "redis://a"

    def __init__(self, replies=(), errors=()):
        self._replies = dict(replies)
        self._errors = dict(errors)

    def senders(self):
        return [self._send]

    def asks(self, key):
        return [(b"BLPOP", key, b"no time")]

    def _send(self, command, *_):
        name = command.decode()
        if name in self._errors:
            raise store_error(self.name, self._errors[name])
        return [part.encode() for pair in self._replies.items() for part in pair]


@pytest.mark.parametrize(
    "text",
    [
        "@user_script: 6: The user executing the script can't run this command or subcommand",
        "ERR The user executing the script can't run this command or subcommand",
        "NOPERM ACL failure in script: User u has no permissions to run the 'hkeys' command",
        "ERR Unknown Redis command called from script",
    ],
    ids=["6.2", "7.0", "7.2", "renamed"],
)
def test_a_command_that_scripts_may_not_run(text):
    """Each version of Redis has words of its own for it; the command is named all the same."""
    with pytest.raises(ForbiddenError, match=r"may not run HKEYS; .* [+]hkeys$"):
        check_rights(Server({"HKEYS": text}), "dislock")


@pytest.mark.parametrize(
    "text",
    [
        "The user executing the script can't access at least one of the keys mentioned in the",
        "NOPERM ACL failure in script: No permissions to access a key",
        "User u has no permissions to access the 'dislock:x' key",
    ],
)
def test_a_key_that_scripts_may_not_touch(text):
    """That no command is at fault is known, too."""
    with pytest.raises(ForbiddenError, match=r"user may not touch all keys .* ~dislock:[*]$"):
        check_rights(Server({"GET": text}), "dislock")


@pytest.mark.parametrize(
    "text",
    [
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "ERR value is not an integer or out of range",
        "ERR Script attempted to access a non local key in a cluster node",
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
    ],
)
def test_another_error_means_that_it_is_allowed(text):
    """What ends in any other error was let through."""
    error = redis.ResponseError(text)
    check_rights(Server({"GET": text}, {"BLPOP": error, "EVALSHA": error}), "dislock")


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA", "BLPOP", "SCAN"])
def test_what_is_sent_beside_scripts(command):
    """Those are named as well, where the server refuses or does not know them."""
    for text in (f"no permissions to run the '{command.lower()}' command", "unknown command 'x'"):
        error = redis.ResponseError(text)
        with pytest.raises(ForbiddenError, match=f"may not run {command};"):
            check_rights(Server(errors={command: error}), "dislock")


def test_a_server_that_is_away_forbids_nothing():
    """Whether it answers is asked elsewhere."""
    check_rights(Server(errors={"EVALSHA": redis.ConnectionError()}), "dislock")
