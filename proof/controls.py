"""Locks that are broken on purpose: what the checker must catch, or it proves nothing.

Each is applied in the processes that work, before they take a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.locks.lease import Lease
from celery_dislock.locks.loop import Loop
from celery_dislock.scripts import RELEASE
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.scripts import Script
    from celery_dislock.servers.requests import Terms


def _rewrite(script: Script, text: str) -> None:
    """Give a script another text; all who use it have the same object."""
    object.__setattr__(script, "text", text)
    object.__setattr__(script, "sha", "0" * 40)  # the server never has it: the text is sent


def release_without_looking_at_the_owner() -> None:
    """Delete the lock at each release, whoever has it by then."""
    _rewrite(RELEASE, "for _, lock in ipairs(KEYS) do redis.call('DEL', lock) end return #KEYS")


def trust_without_an_end() -> None:
    """Believe in a lease until its own process ends it."""
    setattr(Lease, "held", property(lambda lease: lease.end is None))


def a_watchdog_that_dies_at_its_first_error() -> None:
    """End the watchdog's thread when it meets an error."""

    def survive(loop: Loop, _doing: str, _exc: BaseException) -> None:
        loop._current = None  # noqa: SLF001

    setattr(Loop, "survive", survive)


def a_hand_off_that_forgets_the_token() -> None:
    """Give those who waited a token that is no newer."""
    wait = Store.wait

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        handed = wait(*args, **kwargs)
        return handed._replace(token=1) if handed else handed

    setattr(Store, "wait", forgetful)


def a_limit_that_is_one_higher() -> None:
    """Admit one lease more than the limit says."""
    acquire = Store.acquire

    def generous(*args: Any, terms: Terms, **kwargs: Any) -> Any:
        assert isinstance(terms.limit, int)
        return acquire(*args, terms=terms._replace(limit=terms.limit + 1), **kwargs)

    setattr(Store, "acquire", generous)


# By name: what breaks the lock, and the promise that is then broken.
CONTROLS: dict[str, tuple[Callable[[], None], str]] = {
    broken.__name__: (broken, promise)
    for broken, promise in (
        (release_without_looking_at_the_owner, "exclusion"),
        (trust_without_an_end, "exclusion"),
        (a_watchdog_that_dies_at_its_first_error, "kept"),
        (a_hand_off_that_forgets_the_token, "token"),
        (a_limit_that_is_one_higher, "exclusion"),
    )
}
