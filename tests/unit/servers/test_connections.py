"""Connections to one Redis: how each is used again or given up, and what errors mean."""

from __future__ import annotations

import pytest
import redis

from celery_dislock.exceptions import DamagedLockError, ForbiddenError, StoreError
from celery_dislock.servers.connecting import connection_maker
from celery_dislock.servers.connections import demoted, locks_of, store_error

LOCK = "dislock:{k}"
EVALSHA = (b"EVALSHA", "f" * 40, 2, LOCK, "dislock:{l}", "owner", 7)
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NIL = "user_script:5: attempt to compare nil with number"
RECORD = "a lease in it cannot be read: 2 7"
BEHIND = f" script: {'f' * 40}, on @user_script:5."
BEFORE = f"Error running script (call to f_{'f' * 40}): @user_script:5: "


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WRONG_TYPE, WRONG_TYPE),
        (f"{WRONG_TYPE}{BEHIND}", WRONG_TYPE),
        (f"{BEFORE}{WRONG_TYPE}", WRONG_TYPE),
        (f"{NIL}{BEHIND}", NIL),
        (f"{BEFORE}{NIL}", "attempt to compare nil with number"),
        (f"dislock: {RECORD}{BEHIND}", RECORD),
        (f"{BEFORE}dislock: {RECORD}", RECORD),
        (f"hash value is not an integer{BEHIND}", "hash value is not an integer"),
    ],
)
def test_an_error_about_a_lock_names_it(answer, reason):
    """Redis says it in other words before 7.0 and from then on; what it puts around is left out."""
    error = store_error("redis://x", redis.ResponseError(answer), locks_of(EVALSHA))
    assert isinstance(error, DamagedLockError)
    assert (error.reason, error.lock) == (reason, "dislock:{k}, dislock:{l}")


@pytest.mark.parametrize(
    "answer",
    [
        redis.ResponseError(f"OOM command not allowed when used memory > 'maxmemory'{BEHIND}"),
        redis.ResponseError(f"{BEFORE}OOM command not allowed when used memory > 'maxmemory'"),
        redis.ResponseError("NOPERM this user has no permissions to run the 'evalsha' command"),
        redis.ResponseError(f"Unknown Redis command called from script{BEHIND}"),
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.ReadOnlyError("You can't write against a read only replica."),
        redis.ConnectionError("WRONGTYPE"),
        redis.BusyLoadingError("Redis is loading the dataset in memory"),
        TimeoutError("user_script:5: x"),
    ],
)
def test_an_error_of_the_server_is_about_all_locks(answer):
    """Memory, permissions, replicas and connections are the server's affair."""
    assert type(store_error("redis://x", answer, locks_of(EVALSHA))) is StoreError


def test_a_command_that_is_no_script_is_about_no_lock():
    """An error of INFO or BLPOP names no lock."""
    assert locks_of((b"INFO",)) == []
    assert type(store_error("redis://x", redis.ResponseError(WRONG_TYPE), [])) is StoreError


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (redis.ReadOnlyError("You can't write against a read only replica."), True),
        (
            redis.ResponseError(
                "Error running script (call to f_0): @user_script:1: -READONLY You can't write"
            ),
            True,
        ),
        (redis.ResponseError("WRONGTYPE"), False),
        (redis.ConnectionError("READONLY"), False),
    ],
)
def test_a_replica_is_known_by_its_answer(error, is_one):
    """Redis before 7 wraps a script's READONLY in an error of its own; both are known."""
    assert demoted(error) is is_one


def test_what_is_forbidden_is_known_from_an_outage():
    """NOPERM makes an error of its own kind, which is a StoreError still."""
    error = store_error("redis://a", redis.exceptions.NoPermissionError("no"))
    assert type(error) is ForbiddenError


def test_a_connection_is_greeted_without_numbers():
    """As hiredis can crash the process where a signal handler raises while it packs one."""
    packed = []

    class Packer:
        def pack(self, *command):
            packed.append(command)
            return []

    connection = connection_maker("n", "redis://127.0.0.1", {})()
    connection._command_packer._pack = Packer().pack
    connection.pack_command("HELLO", 3, "AUTH", b"user", "secret")
    assert packed == [("HELLO", "3", "AUTH", b"user", "secret")]
