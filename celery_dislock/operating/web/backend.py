"""What the page reads and does: an app's locks, read once for all who look at them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.values import check_key
from celery_dislock.operating.web.listing import Listing
from celery_dislock.operating.web.shared import Outage, Shared
from celery_dislock.scripts.names import lock_in
from celery_dislock.servers.overview import Overview
from celery_dislock.tasks.actions import Actions

if TYPE_CHECKING:
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.operating.web.listing import Row
    from celery_dislock.operating.web.shared import Reading
    from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter

PLACES = 50  # places of a line that are shown at once
LOOKED_AT = 100  # locks that are remembered as they were read
LOCK_FRESH = 1.0  # seconds for which what was read of one lock is shown without asking again
HOLDERS_LISTED = 3  # of a lock in the list; its own view has all
HOLDERS_MOST = 200  # of a lock in its own view
TEXT_MOST = 500  # characters of a name or an argument that came from a message


class Backend:
    """
    The locks of an app, for the page.  Thread-safe.

    Args:
        runtime: What the app's locks share.
        app: The app; None: the locks have none, and nothing can be done to them here.

    Attributes:
        runtime: The argument of that name.
    """

    def __init__(self, runtime: Runtime[Any], app: Any) -> None:
        self.runtime = runtime
        self._app = app
        self._outage = Outage()
        self._listing = Shared(lambda: Listing.read(self.overview), self._outage)
        self._locks: OrderedDict[tuple[str, int], Shared[LockState]] = OrderedDict()
        self._mutex = threading.Lock()
        self._made: tuple[object, Overview] | None = None

    @property
    def server(self) -> str:
        """The lock server's URL without its password."""
        return str(self.runtime.process.store.server)

    @property
    def overview(self) -> Overview:
        """What the lock server knows; of this process, which may be a fork of another."""
        process = self.runtime.process
        made = self._made
        if made is None or made[0] is not process:
            prefix = self.runtime.settings.dislock_prefix
            made = self._made = process, Overview(process.store.lock_server, prefix)
        return made[1]

    @property
    def actions(self) -> Actions:
        """
        What can be done to the locks.

        Raises:
            SettingsError: The locks have no app.
        """
        if self._app is None:
            raise SettingsError("the page", "app", None, "actions need a Celery app")
        return Actions(self._app, self.runtime.process)

    def listing(self) -> Reading[Listing]:
        """Return all locks; see :meth:`Shared.get`."""
        return self._listing.get()

    def lock(self, name: str, first: int = 0) -> Reading[LockState]:
        """Return one lock, with its line from this place; see :meth:`Shared.get`."""
        with self._mutex:
            shared = self._locks.get((name, first))
            if shared is None:
                shared = Shared(
                    lambda: self.overview.lock(name, first, PLACES), self._outage, fresh=LOCK_FRESH
                )
                self._locks[name, first] = shared
            self._locks.move_to_end((name, first))
            while len(self._locks) > LOOKED_AT:
                self._locks.popitem(last=False)
        return shared.get()

    def look(self, name: str) -> LockState:
        """Look at one lock now."""
        return self.overview.lock(name, 0, 0)

    def forget(self) -> None:
        """Read again when somebody asks next: a lock was changed."""
        self._listing.forget()
        with self._mutex:
            self._locks.clear()

    def name_of(self, key: str) -> str:
        """
        Return the name in Redis of the lock of a key, as people write it.

        Raises:
            LockKeyError: The key cannot be used.
        """
        return self.runtime.lock_names([check_key(key)])[0]

    def is_name(self, name: str) -> bool:
        """Tell whether this can be the name of a lock of this app, and of nothing else in Redis."""
        prefix = re.escape(self.runtime.settings.dislock_prefix)
        return bool(re.match(rf"{prefix}:\{{", name)) and lock_in(name) == name


def row_as_json(row: Row) -> dict[str, Any]:
    """Return a lock of the list as the browser gets it."""
    told = {"key": row.key, "name": row.name, "problem": row.problem}
    state = row.state
    if state is None:
        return told
    return {
        **told,
        "holders": [
            _of_holder(holder)
            for holder in sorted(state.holders, key=lambda one: -one.held)[:HOLDERS_LISTED]
        ],
        "held_by": len(state.holders),
        "waiting": state.waiting,
        "aside": state.aside,
        "reserved": state.reservation is not None,
        "reserved_for": state.reservation.since if state.reservation else None,
        "limit": state.limit,
        "limit_age": state.limit_age,
        "troubles": state.troubles,
    }


def lock_as_json(
    state: LockState, first: int, *, show_owners: bool, show_arguments: bool
) -> dict[str, Any]:
    """
    Return a lock's own view as the browser gets it.

    Args:
        state: The lock.
        first: The first place of its line that was read, from 0.
        show_owners: Show what ends a lease or a reservation: for those who may do that.
        show_arguments: Show arguments of tasks.
    """
    return {
        "key": state.key,
        "name": state.name,
        "exists": state.exists,
        "holders": [
            {**_of_holder(one), **({"owner": one.owner} if show_owners else {})}
            for one in sorted(state.holders, key=lambda one: -one.held)[:HOLDERS_MOST]
        ],
        "held_by": len(state.holders),
        "waiting": state.waiting,
        "line": [
            _of_place(one, nth, show_arguments=show_arguments)
            for nth, one in enumerate(state.line, first + 1)
        ],
        "turns": [_of_place(one, 0, show_arguments=show_arguments) for one in state.turns],
        "aside": state.aside,
        "reservation": _of_reservation(state.reservation, show_owners=show_owners),
        "limit": state.limit,
        "limit_remaining": state.limit_remaining,
        "limit_age": state.limit_age,
        "troubles": state.troubles,
        "limit_note": state.limit_note,
        "first": first,
        "places": PLACES,
    }


def _of_holder(holder: Holder) -> dict[str, Any]:
    told = {name: _cut(value) for name, value in holder._asdict().items() if name != "owner"}
    told["token"] = str(holder.token)  # a number of JavaScript has 53 bits
    told["can_be_terminated"] = holder.can_be_terminated
    return told


def _of_reservation(
    reserved: ReservationState | None, *, show_owners: bool
) -> dict[str, Any] | None:
    if reserved is None:
        return None
    told = {name: value for name, value in reserved._asdict().items() if name != "mark"}
    return {**told, **({"mark": reserved.mark} if show_owners else {})}


def _of_place(place: Waiter, nth: int, *, show_arguments: bool) -> dict[str, Any]:
    told = {name: _cut(value) for name, value in place._asdict().items()}
    told |= {"ticket": place.ticket, "place": nth}
    if not show_arguments:
        told["args"] = None
    return told


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_MOST:
        return f"{value[:TEXT_MOST]}..."
    return value
