"""Uses of the public names that must type-check, and a few that must not.

Never run: ``mypy tests/typing`` reads it.  An ignored error that is no error any more is one
itself, so what must be refused is pinned as well.
"""

# Celery has no types, so neither have its decorators; mypy looks into what they decorate.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery import Celery, shared_task
from typing_extensions import assert_type

import celery_dislock
from celery_dislock import (
    Dislock,
    DislockError,
    Lease,
    LockHeldError,
    LockKeyError,
    LockLostError,
    SettingsError,
    SingletonTask,
    StoreError,
    current_lease,
)
from celery_dislock.signals import lock_conflict, lock_lost, lock_released

if TYPE_CHECKING:
    from celery_dislock.locks.attempt import Conflict

app = Celery("shop", broker="redis://localhost:6379/0")
dislock = Dislock(app)
assert_type(dislock, Dislock)
assert_type(dislock.lock_of("export:7").key, str)
assert_type([holder.token for holder in dislock.lock_of(["a", "b"]).free()], list[int])

by_keyword = Dislock(app=app)
Dislock()  # type: ignore[call-arg]


# Tasks.


@app.task(base=SingletonTask, lock_key="export:<corp_id>", lock_watchdog_timeout=60)
def export(corp_id: int) -> int:
    """A body that asks for its lease."""
    lease = current_lease()
    assert_type(lease, "Lease | None")
    lease.token  # type: ignore[union-attr]  # noqa: B018 -- a task may take no lock
    return lease.token if lease is not None else corp_id


@shared_task(bind=True, base=SingletonTask, lock_key=lambda order: f"buy:{order['id']}")
def buy(self: SingletonTask, order: dict[str, Any]) -> None:
    """A bound body reads its lease from the task."""
    assert_type(self.lease, "Lease | None")
    self.lease.ensure_held()  # type: ignore[union-attr]
    if self.lease is not None:
        self.lease.ensure_held()
    self.lease = None  # type: ignore[misc]


class Invoice(SingletonTask):
    """A base class of one's own."""

    lock_key = "invoice:<corp_id>"
    max_renew_times = 0

    def run(self, corp_id: int) -> str:
        """A body as a method."""
        return self.lease.key if self.lease else str(corp_id)


# The lease.


def use(lease: Lease) -> None:
    """What a body may ask of its lease."""
    assert_type(lease.key, str)
    assert_type(lease.owner, str)
    assert_type(lease.token, int)
    assert_type(lease.held, bool)
    assert_type(lease.remaining, float)
    assert_type(lease.renewals, int)
    lease.ensure_held()
    lease.held = True  # type: ignore[misc]
    lease.remaining = 5.0  # type: ignore[misc]
    lease.expiry  # type: ignore[attr-defined]  # noqa: B018


# Locks in plain Python: each option is a parameter.


def hold() -> None:
    """A lock's lease is typed, and what is unknown is an error to the checker, too."""
    with Dislock.from_url("redis://localhost") as dislock:
        with dislock.lock("k", mode="shared", timeout=5, expire=timedelta(minutes=1)) as lease:
            assert_type(lease, Lease)
        with ExitStack() as stack:
            assert_type(stack.enter_context(dislock.lock(["a", "b"], limit=2)), Lease)
        assert_type(dislock.lock("k", on_lost="raise").try_acquire(), "Lease | Conflict")
        dislock.lock("k", ttl=5)  # type: ignore[arg-type]
        dislock.lock("k", mode="sharde")  # type: ignore[arg-type]
        dislock.lock("k", timeout="5")  # type: ignore[arg-type]


# Signals.


@lock_lost.connect
def page_someone(sender: SingletonTask, lease: Lease, reason: str, **kwargs: Any) -> None:
    """A receiver by decorator."""
    assert_type(lease.key, str)


def count_conflicts(sender: SingletonTask, conflict: Conflict, **kwargs: Any) -> None:
    """A receiver that is told of a conflict."""
    assert_type(conflict.key, str)
    assert_type(conflict.remaining, float)
    assert_type(conflict.error(), LockHeldError)


lock_conflict.connect(count_conflicts, weak=False)
lock_released.disconnect(count_conflicts)


# Errors.


def handle() -> None:
    """Every error carries its data, and is caught by its base."""
    try:
        use_somehow()
    except LockHeldError as exc:
        assert_type(exc.key, str)
        assert_type(exc.holder, str)
        assert_type(exc.remaining, float)
        exc.reason  # type: ignore[attr-defined]  # noqa: B018
    except LockLostError as exc:
        assert_type(exc.key, str)
        assert_type(exc.reason, str)
    except LockKeyError as exc:
        assert_type(exc.template, str)
        assert_type(exc.argument, "str | None")
        assert_type(exc.reason, str)
    except SettingsError as exc:
        assert_type(exc.owner, str)
        assert_type(exc.option, str)
        assert_type(exc.value, object)
        assert_type(exc.remedy, str)
    except StoreError as exc:
        assert_type(exc.server, str)
        assert_type(exc.reason, str)
    except DislockError as exc:
        exc.key  # type: ignore[attr-defined]  # noqa: B018


def use_somehow() -> None:
    """Stands for work."""


as_value_error: ValueError = SettingsError("shop.export", "lock_key", 7, "give a template")
also_value_error: ValueError = LockKeyError("export:<corp_id>", "corp_id", "is None")
LockHeldError("export:7")  # type: ignore[call-arg]
LockHeldError("export:7", "someone", "long")  # type: ignore[arg-type]

celery_dislock.Lock  # type: ignore[attr-defined]  # noqa: B018 -- no public name
