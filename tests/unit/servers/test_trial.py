"""What a server's refusals mean; the real ones are in the integration tests."""

from __future__ import annotations

import re

import pytest
import redis

from celery_dislock import scripts
from celery_dislock.exceptions import ForbiddenError, StoreError
from celery_dislock.scripts import Script
from celery_dislock.servers.connections import Demoted, store_error
from celery_dislock.servers.server import Member
from celery_dislock.servers.trial import check_scripts, complaints

SCRIPTS = {one.sha for one in vars(scripts).values() if isinstance(one, Script)}
NAME = "redis://a"


class Server:
    """
    One process, which answers every command.

    Args:
        errors: What it answers to some commands instead, by name.
    """

    def __init__(self, /, **errors):
        self.errors = errors
        self.sent = []
        self.trips = 0

    def members(self):
        return [Member(NAME, self.send, lambda: self, lambda key: key.endswith("-3}"))]

    def asks(self, key):
        return [(b"BLPOP", key, 0.01)]

    def send(self, *command):
        self.trips += 1
        return self._answer(command)

    def ask(self, commands):
        self.trips += 1
        return [self._or_error(command) for command in commands]

    def close(self):
        pass

    def _or_error(self, command):
        try:
            return self._answer(command)
        except StoreError as exc:
            if not isinstance(exc.raw, redis.ResponseError):
                raise
            return exc

    def _answer(self, command):
        self.sent.append(command)
        if error := self.errors.get(command[0].decode()):
            raise store_error(NAME, error)
        return b"OK"


def refused(text):
    return redis.ResponseError(text)


def found(**errors):
    return complaints(Server(**errors), "dislock")


def test_all_is_tried_in_one_round_trip():
    """A server that has the scripts runs each of them, on keys of one unknown lock of that node."""
    server = Server()
    assert complaints(server, "shop") == []
    assert server.trips == 1
    ran = {command[1] for command in server.sent if command[0] == b"EVALSHA"}
    assert ran == SCRIPTS
    keys = {key for command in server.sent if command[0] == b"DEL" for key in command[1:]}
    assert all(re.match(r"shop:.*\{trial-[0-9a-f]{8}-3\}", key) for key in keys)


def test_a_server_without_the_scripts_is_brought_them_in_a_second_trip():
    """It has been restarted, or is new."""
    server = Server(EVALSHA=redis.exceptions.NoScriptError("No matching script"))
    ask = server.ask

    def learn(commands):
        replies = ask(commands)
        server.errors.clear()
        return replies

    server.ask = learn
    assert complaints(server, "dislock") == []
    assert server.trips == 2


def test_what_interrupts_the_trial_leaves_nothing_behind():
    """A signal, in the middle of it."""

    class Interrupted(Server):
        def send(self, *command):
            if command[0] == b"BLPOP":
                raise KeyboardInterrupt
            return super().send(*command)

    server = Interrupted(BLPOP=refused("no"))
    with pytest.raises(KeyboardInterrupt):
        complaints(server, "dislock")
    assert server.sent[-1][0] == b"DEL"


IN_SCRIPTS = [
    "@user_script: {line}: The user executing the script can't run this command or subcommand",
    "The user executing the script can't run this command script: 0, on @user_script:{line}.",
    "ACL failure in script: User u has no permissions to run the 'hkeys' command",
]


@pytest.mark.parametrize("text", IN_SCRIPTS, ids=["6.2", "7.0", "7.2"])
def test_a_command_that_scripts_may_not_run(text):
    """Each version of Redis has words of its own for it; the command is named all the same."""
    lines = scripts.RELEASE_DEAD.text.splitlines()
    line = next(number for number, line in enumerate(lines, 1) if "'HKEYS'" in line)

    class OnlyThere(Server):
        def _answer(self, command):
            if command[1] in (scripts.RELEASE_DEAD.sha, scripts.RELEASE_DEAD.text):
                raise store_error(NAME, refused(text.format(line=line)))
            return b"OK"

    with pytest.raises(ForbiddenError, match=r"may not run HKEYS; .* [+]hkeys$"):
        check_scripts(OnlyThere(), "dislock")


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
        check_scripts(Server(EVALSHA=refused(text)), "dislock")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("no permissions to run the 'eval' command", "ACL SETUSER"),
        ("unknown command 'EVAL'", "rename-command"),
        ("Unknown Redis command called from script script: 0, on @user_script:1.", "rename-com"),
        ("script tried accessing undeclared key", "allow-undeclared-keys"),
        ("all the keys that the script uses should be passed using the KEYS array", "undeclared"),
        ("EVAL is not supported by this proxy", "that runs Lua scripts"),
        ("invalid request", "that runs Lua scripts"),
    ],
)
def test_the_remedy_fits_the_cause(text, remedy):
    """An ACL helps where an ACL forbids, and nowhere else; the server's own words are told."""
    [one] = found(EVAL=refused(text), EVALSHA=refused(text))
    assert remedy in one.remedy
    assert ("ACL" in one.remedy) == (remedy == "ACL SETUSER")
    assert (text.partition(" script:")[0] in one.what) == (remedy != "ACL SETUSER")
    assert one.servers == [NAME]


@pytest.mark.parametrize(
    "text",
    [
        "command not allowed when used memory > 'maxmemory'.",
        "Error running script: @user_script: 1: -OOM command not allowed",
        "MISCONF Redis is configured to save RDB snapshots, but",
        "NOREPLICAS Not enough good replicas to write.",
    ],
)
def test_what_passes_by_itself_keeps_no_worker_from_starting(text):
    """It is told to who asks."""
    server = Server(EVALSHA=refused(text))
    check_scripts(server, "dislock")
    assert [one.passes for one in complaints(server, "dislock")] == [True]


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.MovedError("1 127.0.0.1:1"),
        redis.exceptions.AskError("1 127.0.0.1:1"),
        redis.exceptions.TryAgainError("its slot is being moved"),
        redis.exceptions.ClusterDownError("Hash slot not served"),
        refused("BUSY Redis is busy running a script."),
        Demoted("it is a replica, and no longer the master"),
    ],
)
def test_what_is_another_answer_a_moment_later(error):
    """Nothing is refused."""
    assert found(EVALSHA=error) == []


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA", "BLPOP", "SCAN", "DEL"])
@pytest.mark.parametrize("text", ["NOPERM no permissions to run it", "unknown command 'x'", "no"])
def test_what_is_sent_beside_scripts(command, text):
    """Those are named as well, where the server refuses or does not know them."""
    with pytest.raises(ForbiddenError, match=rf"\b{command}\b"):
        check_scripts(Server(**{command: refused(text)}), "dislock")


def test_a_server_that_is_away_refuses_nothing():
    """Whether it answers is asked elsewhere."""
    away = redis.ConnectionError()
    assert found(EVALSHA=away, PING=away) == []


@pytest.mark.parametrize("ping", [None, refused("unknown command 'PING'")])
def test_a_proxy_that_ends_the_connection_refuses(ping):
    """It answers other commands, in whatever words."""
    [one] = found(EVALSHA=redis.ConnectionError(), EVAL=redis.ConnectionError(), PING=ping)
    assert "EVAL" in one.what
    assert "Lua" in one.remedy


def test_where_no_name_is_on_the_node_a_name_is_tried():
    """A prefix with braces puts all names into one slot, which another node may have."""

    class OneSlot(Server):
        def members(self):
            return [Member(NAME, self.send, lambda: self, lambda _: False)]

    assert complaints(OneSlot(), "{shop}") == []
