"""What a server's errors mean, whatever its name and version."""

import pytest
from redis.exceptions import ResponseError, TryAgainError

from celery_dislock.servers import connections

SCRIPT = "script: 0123456789abcdef, on @user_script:329."


@pytest.mark.parametrize(
    "text",
    [
        "Script attempted to access a non local key in a cluster node",
        "Attempted to access a non local key in a cluster node",
        "Unable to execute it in script because undeclared keys were accessed during rehashing",
    ],
)
def test_a_script_that_misses_a_key_of_a_slot_that_moves_is_sent_again(text):
    """In the words of Redis 7.0, of Valkey 9, and of Redis 8: none of them is an answer."""
    with pytest.raises(TryAgainError, match="is being moved"):
        raise connections._meant(ResponseError(f"{text} {SCRIPT}"))
