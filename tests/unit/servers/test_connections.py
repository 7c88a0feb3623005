"""What a server's errors mean, whatever its name and version."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError, TryAgainError

from celery_dislock.servers import connections

SCRIPT = "script: 0123456789abcdef, on @user_script:329."


@pytest.mark.parametrize(
    "text",
    [
        f"Script attempted to access a non local key in a cluster node {SCRIPT}",  # Redis 7
        f"ERR Script attempted to access a non local key in a cluster node {SCRIPT}",
        f"Attempted to access a non local key in a cluster node {SCRIPT}",  # Valkey 9
    ],
)
def test_a_script_that_misses_a_key_of_a_slot_that_moves_is_sent_again(text):
    """It is no answer: the script may have begun, and its keys are on two nodes for a moment."""
    with pytest.raises(TryAgainError, match="is being moved"):
        raise connections._meant(ResponseError(text))
