"""Tests that are coroutines."""

import asyncio
import functools
import sys


async def some_rounds():
    """Let the event loop go round."""
    for _ in range(2):
        await asyncio.sleep(0)


def on_loop(test):
    """Run a coroutine as the test; at its end, nobody has asked to cancel it."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            await test(*args, **kwargs)
            if sys.version_info >= (3, 11):
                assert asyncio.current_task().cancelling() == 0
            await some_rounds()  # where a late cancellation is raised

        asyncio.run(main())

    return run
