"""Uses of the public names that must type-check, and a few that must not.

Never run: ``mypy tests/typing`` reads it.  An ignored error that is no error any more is one
itself, so what must be refused is pinned as well.
"""

# Celery has no types, so neither have its decorators; mypy looks into what they decorate.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from datetime import timedelta
from typing import Any

from celery import Celery, shared_task
from typing_extensions import assert_type

import celery_dislock
from celery_dislock import (
    AsyncLock,
    Conflict,
    Dislock,
    DislockError,
    Key,
    Lease,
    LockHeldError,
    LockKeyError,
    LockLostError,
    SettingsError,
    SingletonTask,
    StoreError,
    current_lease,
    ensure_held,
)
from celery_dislock.servers.view import Holder, ReservationState
from celery_dislock.servers.waiters import Place
from celery_dislock.signals import lock_conflict, lock_lost, lock_released
from celery_dislock.tasks.answer import Answer

app = Celery("shop", broker="redis://localhost:6379/0")
dislock = Dislock(app)
assert_type(dislock, Dislock)
assert_type(dislock.lock_of("export:7").key, str)
assert_type([holder.token for holder in dislock.lock_of(["a", "b"]).holders()], list[int])
assert_type(dislock.lock_of("a").free(), list[Holder | ReservationState])
assert_type(dislock.why("9b1d", key="export:7"), Answer)
assert_type(dislock.place("9b1d"), Place | None)

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
    assert_type(self.lease, Lease)
    self.lease.ensure_held()
    if self.lease:
        assert_type(self.lease.token, int)
    assert_type(ensure_held(), None)
    self.lease = None  # type: ignore[assignment, misc]


class Invoice(SingletonTask):
    """A base class of one's own."""

    lock_key = "invoice:<corp_id>"
    max_renew_times = 0

    def run(self, corp_id: int) -> str:
        """A body as a method."""
        return self.lease.key if self.lease else str(corp_id)


# Tasks by the typed decorator: options, arguments and results are known.


@dislock.task(lock_key="export:<corp_id>", lock_on_conflict="retry", lock_retry_for=timedelta(1))
def typed(corp_id: int, *, fast: bool = False) -> str:
    """A body with types."""
    return f"{corp_id} {fast}"


@dislock.task(
    bind=True, lock_key=["a", Key("b", limit=3), lambda n: [f"c:{n}"]], max_retries=5, queue="slow"
)
def typed_and_bound(self: SingletonTask, feed: str) -> int:
    """A bound body, whose first argument is not the caller's."""
    self.lease.ensure_held()
    return self.lease.token


@dislock.task(bind=True, base=Invoice, lock_key=lambda corp_id: f"invoice:{corp_id}")
def typed_with_base(self: Invoice, corp_id: int) -> None:
    """A class of one's own."""
    assert_type(self.lease, Lease)


def plan_of(tenant: str) -> int:
    """A callable that tells a limit."""
    return len(tenant)


@dislock.task(
    lock_key=["a", Key("t:<tenant>", limit=plan_of, rate=lambda tenant: tenant or None)],
    lock_limit=plan_of,
    lock_rate=plan_of,
    lock_cost=plan_of,
)
def typed_with_a_plan(tenant: str) -> None:
    """Its terms are told by calls."""


def unless_it_is_being_done(task: SingletonTask, conflict: Conflict) -> str | None:
    """A callable that chooses a strategy; None is "skip"."""
    return None if conflict.holder.get("task") == task.name else "wait"


@dislock.task(lock_key="corp:<corp_id>", lock_on_conflict=unless_it_is_being_done)
def typed_with_callable(corp_id: int) -> None:
    """Its conflicts are judged one by one."""


@dislock.task
def plain() -> None:
    """Without parentheses."""


@dislock.task()
def empty() -> float:
    """With all defaults."""
    return 0.0


def send() -> None:
    """What a caller gets."""
    assert_type(typed(7), str)
    assert_type(typed.delay(7, fast=True).get(timeout=5), str)
    assert_type(typed.delay(7).duplicate, bool)
    assert_type(typed.delay(7).id, str)
    assert_type(typed.apply_async((7,), countdown=5).duplicate, bool)
    assert_type(typed_and_bound.delay("a").get(), int)
    assert_type(typed_and_bound("a"), int)
    assert_type(typed_with_base.lock_for(7).key, str)
    assert_type(typed_with_base.why("9b1d").sentence, str)
    assert_type(empty.delay().get(), float)
    plain.delay()
    typed.s(7).delay()
    typed.delay("7")  # type: ignore[arg-type]
    typed.delay()  # type: ignore[call-arg]
    typed.delay(corp=7)  # type: ignore[call-arg]
    typed_and_bound.delay()  # type: ignore[call-arg]
    plain.delay(7)  # type: ignore[call-arg]


def send_again(task: SingletonTask) -> bool:
    """A task by @app.task(base=SingletonTask) is untyped in Celery; what it returns is not."""
    assert_type(task.delay(7).duplicate, bool)
    return task.apply_async((7,), countdown=5).duplicate


dislock.task(lock_kee="export")  # type: ignore[call-overload]
dislock.task(key="export")  # type: ignore[call-overload]
dislock.task(lock_on_conflict="skipp")  # type: ignore[call-overload]
dislock.task(lock_on_lost="expire")  # type: ignore[call-overload]
dislock.task(lock_limit="5")  # type: ignore[call-overload]
dislock.task(lock_watchdog_timeout="60")  # type: ignore[call-overload]
dislock.task(max_retry=5)  # type: ignore[call-overload]
dislock.task(base=int)  # type: ignore[arg-type]


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
        answer = dislock.lock("k").try_acquire()
        if isinstance(answer, Conflict):
            assert_type(answer, Conflict)
        if not answer:
            assert_type(answer.holder, Mapping[str, Any])
            return
        assert_type(answer, Lease)
        dislock.lock("k", ttl=5)  # type: ignore[call-arg]
        dislock.lock("k", mode="sharde")  # type: ignore[arg-type]
        dislock.lock("k", timeout="5")  # type: ignore[arg-type]


async def hold_in_a_coroutine() -> None:
    """The lock of coroutines has the same options, and each of its methods is awaited."""
    async with Dislock.from_url("redis://localhost") as dislock:
        assert_type(dislock, Dislock)
        assert_type(await dislock.async_place("9b1d", key=["a", "b"]), Place | None)
        lock = dislock.async_lock("k", mode="shared", limit=2, timeout=timedelta(seconds=5))
        assert_type(lock, AsyncLock)
        async with lock as lease:
            assert_type(lease, Lease)
        async with AsyncExitStack() as stack:
            assert_type(await stack.enter_async_context(dislock.async_lock(["a", "b"])), Lease)
        assert_type(await lock.acquire(timeout=5), bool)
        answer = await lock.try_acquire()
        assert_type(answer, "Lease | Conflict")
        if answer:
            assert_type(answer, Lease)
        assert_type(await lock.locked(), bool)
        assert_type(await lock.holders(), list[Holder])
        assert_type(await lock.extend(), None)
        assert_type(await lock.release(), None)
        assert_type(lock.lease, "Lease | None")
        assert_type(lock.keys, tuple[str, ...])
        assert_type(await dislock.aclose(), None)
        with lock:  # type: ignore[attr-defined]
            pass
        async with dislock.lock("k"):  # type: ignore[attr-defined]
            pass
        if lock.acquire():  # type: ignore[truthy-bool]
            pass
        lock.release()  # type: ignore[unused-coroutine]
        await lock  # type: ignore[misc]
        dislock.async_lock("k", ttl=5)  # type: ignore[call-arg]
        dislock.async_lock("k", mode="sharde")  # type: ignore[arg-type]
        dislock.async_lock("k", on_lost="terminate")  # type: ignore[arg-type]


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
