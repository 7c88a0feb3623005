"""What the tests of keys and of their values share."""

from __future__ import annotations

from celery_dislock.keys.templates import MAX_KEY_BYTES, check_key


class LoudText(str):
    """A str that prints as something else."""

    __slots__ = ()

    def __str__(self) -> str:
        return "loud"


def assert_valid(key: str) -> None:
    """Fail unless a key is one that the lock server can be given."""
    assert key
    assert len(key.encode()) <= MAX_KEY_BYTES
    assert not set("{}\x7f\x85\u2028\u2029") & set(key)
    assert min(key) >= " "
    assert check_key(key) == key
