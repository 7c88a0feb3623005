"""An app's locks, for the commands and the page: what they read, do and list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery

from celery_dislock.config.censoring import in_place_of_app
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.operating.site import Site
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.overview import Overview
from celery_dislock.tasks.actions import Actions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.view import Holder, LockState


class AppLocks:
    """
    The locks of an app.  Thread-safe.

    Args:
        app: The Celery app, or its ``Dislock``.
        within: Seconds to wait for each reply when locks are read; None: as the settings say.

    Attributes:
        app: The Celery app; None: the ``Dislock`` has none.
        runtime: What the app's locks share.

    Raises:
        SettingsError: It is neither.
    """

    def __init__(self, app: Any, within: float | None = None) -> None:
        self.app: Any
        self.runtime: Runtime[ParkingProcess]
        if isinstance(app, Celery):
            self.app, self.runtime = app, runtime_of(app)
        elif hasattr(app, "runtime"):
            self.app, self.runtime = vars(app).get("_app"), app.runtime
        else:
            given = in_place_of_app(app)
            raise SettingsError("locks", "app", given, "give a Celery app, or its Dislock")
        self._within = within
        self._overviews: dict[ParkingProcess, Overview] = {}  # one; a forked process makes its own

    @property
    def process(self) -> ParkingProcess:
        """The store and the lines of this process."""
        return self.runtime.process

    @property
    def overview(self) -> Overview:
        """What the lock server knows, read over connections that nothing else uses."""
        process = self.process
        overview = self._overviews.get(process)
        if overview is None:
            server = process.new_store(self._within).lock_server
            overview = Overview(server, process.settings.dislock_prefix)
            self._overviews = {process: overview}
        return overview

    @property
    def site(self) -> Site:
        """What is known beside the locks, asked anew."""
        return Site(self.overview, self.app)

    @property
    def actions(self) -> Actions:
        """
        What a person can do to locks.

        Raises:
            SettingsError: The locks have no app, which alone can store how a parked task ended.
        """
        if self.app is None:
            raise SettingsError("locks", "app", None, "actions need a Celery app")
        return Actions(self.app, self.process)


SOUND = 100  # rank of a lock with which nothing is wrong


class ListedLock(NamedTuple):
    """
    A lock of a list.

    Attributes:
        key: The key.
        name: The lock's name in Redis.
        found: What the lock server knows of it, or why that cannot be read.
        troubles: What is wrong with it, the worst first, each with the seconds for which it is so,
            if they are known; see :func:`celery_dislock.operating.checks.troubles.judged`.
        rank: A number by which lists are sorted, the worst first.
    """

    key: str
    name: str
    found: LockState | StoreError
    troubles: Mapping[str, float | None] = {}
    rank: int = SOUND

    @property
    def state(self) -> LockState | None:
        """What the lock server knows of it; None if it cannot be read."""
        return None if isinstance(self.found, StoreError) else self.found

    @property
    def problem(self) -> StoreError | None:
        """Why it cannot be read."""
        return self.found if isinstance(self.found, StoreError) else None

    @property
    def holders(self) -> Sequence[Holder]:
        """Its leases."""
        return self.state.holders if self.state else ()

    @property
    def longest(self) -> float:
        """Seconds for which a holder has held it, the longest."""
        return max((holder.held for holder in self.holders), default=0.0)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return self.state.waiting if self.state else 0


def rows(
    overview: Overview, pattern: str = "*", failed: list[StoreError] | None = None, most: int = 1
) -> Iterator[ListedLock]:
    """
    Read all locks whose keys match, with *most* places of their lines, in pages.

    See :meth:`Overview.names`.  A lock that may be taken now and has nothing but the rate of its
    task is left out: it was taken within the last window, and that is all.

    Raises:
        StoreError: A server did not answer.
    """
    for names in overview.names(pattern, failed):
        for name, found in zip(names, overview.look(names, most), strict=True):
            if isinstance(found, StoreError) or (found.exists and not _is_idle(found)):
                yield ListedLock(key_of(name), name, found)


def _is_idle(lock: LockState) -> bool:
    if lock.rate is None or lock.is_too_early or lock.is_limited:
        return False
    return not lock._replace(rate=None).exists


def as_data(known: Any) -> Any:
    """Return data for JSON, with an object in place of each named tuple."""
    fields = known._asdict() if hasattr(known, "_asdict") else known
    if isinstance(fields, dict):
        return {name: as_data(value) for name, value in fields.items()}
    return [as_data(key) for key in known] if isinstance(known, list) else known
