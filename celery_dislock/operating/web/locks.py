"""An app's locks, for the page: what it reads, what it does, and how a lock becomes JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.values import check_key
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts.names import lock_in
from celery_dislock.servers.overview import Overview
from celery_dislock.tasks.actions import Actions

if TYPE_CHECKING:
    from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter

PLACES = 50  # places of a line that are shown at once
HOLDERS_MOST = 200  # of a lock in its own view


class AppLocks:
    """
    The locks of an app.  Thread-safe, but for the batches of an overview.

    Args:
        app: The Celery app, or its ``Dislock``.

    Raises:
        SettingsError: It is neither.
    """

    def __init__(self, app: Any) -> None:
        if not (isinstance(app, Celery) or hasattr(app, "runtime")):
            raise SettingsError("the page", "app", app, "give a Celery app, or its Dislock")
        self._app = app if isinstance(app, Celery) else vars(app).get("_app")
        self._runtime = runtime_of(app) if isinstance(app, Celery) else app.runtime

    @property
    def server(self) -> str:
        """The lock server's URL without its password."""
        return str(self._runtime.process.store.server)

    @property
    def overview(self) -> Overview:
        """What the lock server knows."""
        prefix = self._runtime.settings.dislock_prefix
        return Overview(self._runtime.process.store.lock_server, prefix)

    @property
    def actions(self) -> Actions:
        """
        What can be done to the locks.

        Raises:
            SettingsError: The locks have no app.
        """
        if self._app is None:
            raise SettingsError("the page", "app", None, "actions need a Celery app")
        return Actions(self._app, self._runtime.process)

    def name_of(self, key: str) -> str:
        """
        Return the name in Redis of the lock of a key, as people write it.

        Raises:
            LockKeyError: The key cannot be used.
        """
        return self._runtime.lock_names([check_key(key)])[0]

    def is_name(self, name: str) -> bool:
        """Tell whether this can be the name of a lock of this app, and of nothing else in Redis."""
        prefix = self._runtime.settings.dislock_prefix
        return name.startswith(f"{prefix}:{{") and lock_in(name) == name


def as_json(
    state: LockState,
    *,
    show_owners: bool = False,
    show_arguments: bool = False,
    most: int = HOLDERS_MOST,
) -> dict[str, Any]:
    """
    Return a lock as the browser gets it.

    Args:
        state: The lock.
        show_owners: Show what ends a lease or a reservation: for those who may do that.
        show_arguments: Show arguments of tasks.
        most: Maximum number of holders; those who have held it for longest.
    """
    oldest = sorted(state.holders, key=lambda one: -one.held)[:most]
    return {
        **state._asdict(),
        "exists": state.exists,
        "troubles": state.troubles,
        "held_by": len(state.holders),
        "holders": [_holder(one, show_owner=show_owners) for one in oldest],
        "line": [_waiter(one, show_arguments=show_arguments) for one in state.line],
        "turns": [_waiter(one, show_arguments=show_arguments) for one in state.turns],
        "reservation": _reservation(state.reservation, show_mark=show_owners),
    }


def _holder(holder: Holder, *, show_owner: bool) -> dict[str, Any]:
    return {
        **holder._asdict(),
        "owner": holder.owner if show_owner else None,
        "token": str(holder.token),  # a number of JavaScript has 53 bits
        "can_be_terminated": holder.can_be_terminated,
    }


def _waiter(waiter: Waiter, *, show_arguments: bool) -> dict[str, Any]:
    return {**waiter._asdict(), "args": waiter.args if show_arguments else None}


def _reservation(state: ReservationState | None, *, show_mark: bool) -> dict[str, Any] | None:
    if state is None:
        return None
    return {**state._asdict(), "mark": state.mark if show_mark else None}
