"""A task of SingletonTask has what its app gives it: nothing of another app's."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.integration import bound


def spawned(call, **options):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, **options).result()


@pytest.mark.parametrize(
    ("as_current", "shared", "in_thread"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_task_has_exactly_what_a_plain_base_would_give_it(as_current, shared, in_thread):
    """acks_late, serializer, rate limit, annotations and all else are its own app's, of three."""
    options = {"as_current": as_current, "shared": shared, "in_thread": in_thread}
    assert spawned(bound.differences, **options) == []
