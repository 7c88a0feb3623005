"""Every option of a task, each declared once; see :mod:`celery_dislock.config.settings`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.config.values import (
    Check,
    number_from,
    one_of,
    optional,
    seconds,
    whole_number,
    yes_or_no,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

RENEWALS_PER_TIMEOUT = 3  # of a lease; two may fail in a row before it is lost
RENEWALS_MISSED = 2  # renewals missed in a row after which a lease counts as overdue


# Each may be a callable that takes the task's arguments; `TaskKeys` calls it.
Limit = int | Callable[..., int] | None
RateOf = Rate | str | int | Callable[..., str | int | None] | None
Cost = int | str | Callable[..., int] | None  # of a start


@dataclass(frozen=True)
class Key:
    """
    A key in a ``lock_key`` with terms of its own; what it leaves out is as the task's options say.

    A task of a tenant that may run three at a time, beside one call of the API at a time::

        @app.task(base=SingletonTask, lock_key=[Key("tenant:<tenant>", limit=3), "api"])
        def sync(tenant): ...

    Attributes:
        key: A template, or a callable that takes the task's arguments; of several keys that it
            returns, each has these terms.
        limit: Maximum number of exclusive leases of this key at a time, > 0, or a callable; in
            place of the task's ``lock_limit``.  A key with a rate and without a limit has none.
        rate: How often this key is taken at most, as ``"100/m"``, or a callable; in place of the
            task's ``lock_rate``.
        cost: Units of the limit that a lease takes, and starts of the rate that it counts for; in
            place of the task's ``lock_cost``.
    """

    key: str | Callable[..., str | Sequence[str]]
    limit: int | Callable[..., int] | None = None
    rate: str | int | Callable[..., str | int | None] | None = None
    cost: int | str | Callable[..., int] | None = None

    def terms(self, mode: str) -> Terms:
        """
        Return the terms of a key that leaves nothing out, as far as no call tells them.

        A limit that calls tell counts as none until then.
        """
        return Terms(
            mode,
            self.limit if isinstance(self.limit, int) else LIMIT_MOST,
            None if self.rate is None or callable(self.rate) else Rate.of(self.rate),
            self.cost if isinstance(self.cost, int) else None,
        )

    @property
    def told(self) -> dict[str, str | Callable[..., object]]:
        """What only the arguments of a call tell: "limit", "rate" or "cost" -> how they do."""
        how = {"limit": self.limit, "rate": self.rate, "cost": self.cost}
        return {
            name: value
            for name, value in how.items()
            if callable(value) or (name == "cost" and isinstance(value, str))
        }


def lock_key(value: object) -> object:
    """Check the type of a ``lock_key``; the key builder checks its template."""
    if isinstance(value, (list, tuple)):
        if not value or not all(map(_is_key, value)):
            raise ValueError(
                "give one template or callable at least (or a Key of it), and nothing else, in a "
                "list"
            )
        return tuple(value)
    if isinstance(value, Key) and _is_key(value):
        return (value,)
    if value is None or value is False or _is_key(value):
        return value
    raise ValueError(
        "give a template such as 'export:<corp_id>', a callable, a list of them, None or False"
    )


def lock_cost(value: object) -> object:
    """Check the cost of a start, if it is no callable: a number, or the argument that has it."""
    if not isinstance(value, str):
        return number_from(1, LIMIT_MOST)(value)
    if not COST_OF.fullmatch(value):
        raise ValueError("give a whole number, '<name>' of an argument that has it, or a callable")
    return value


def told_or(check: Check) -> Check:
    """Make a check that accepts a callable, and passes any other value to *check*."""

    def check_told(value: object) -> object:
        _refuse_coroutine(value)
        return value if callable(value) else check(value)

    return check_told


# Of None, too: a check of what a callable returns is one of these.
TERMS: dict[str, Check] = {
    "limit": number_from(1, LIMIT_MOST),
    "rate": optional(Rate.of),
    "cost": number_from(1, LIMIT_MOST),
}


def lock_on_conflict(value: object) -> object:
    """Check a strategy: its name, or a callable that takes the task and the conflict."""
    if not callable(value):
        return _strategy(value)
    _refuse_coroutine(value)
    try:
        inspect.signature(value).bind(None, None)
    except TypeError as exc:
        raise ValueError("give a callable that takes the task and the conflict") from exc
    except (ValueError, NameError):  # a built-in callable, or types that are not imported
        pass
    return value


def _is_key(value: object) -> bool:
    if isinstance(value, Key):
        _check_terms(value)
        value = value.key
    _refuse_coroutine(value)
    return isinstance(value, str) or callable(value)


def _check_terms(key: Key) -> None:
    if key.limit is None and key.rate is None and key.cost is None:
        raise ValueError(f"give {key!r} a limit, a rate or a cost, or the template alone")
    for name, check in {**TERMS, "cost": lock_cost}.items():
        given = getattr(key, name)
        try:
            if given is not None:
                told_or(check)(given)
        except ValueError as exc:
            raise ValueError(f"the {name} of {key!r}: {exc}") from exc


def _refuse_coroutine(value: object) -> None:
    if inspect.iscoroutinefunction(value):
        raise ValueError("give a plain function: an `async def` is not awaited")


COST_OF = re.compile(r"<[^<>]+>")  # the placeholder of an argument

UNIQUE_UNTIL = ("start", "end", "expiry")  # of lock_unique_until

STRATEGIES = ("skip", "raise", "retry", "wait", "queue", "cancel", "reject")

IN_LINE = ("queue", "cancel")  # strategies of tasks that are parked

_strategy = one_of(*STRATEGIES)


def declare(default: Any, check: Check, *, unit: str = "", secret: bool = False) -> Any:
    """Declare an option or a setting; the comment above it describes it on the reference page."""
    metadata = {"check": check, "unit": unit}
    if isinstance(default, dict):
        return field(default_factory=default.copy, repr=not secret, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class TaskOptions:
    """How a task takes its lock; see the reference page for each option's meaning."""

    #: Name of the lock: a template such as `export:<corp_id>`, a callable, or a list of them. None
    #: on a SingletonTask: the task's name and a digest of all arguments. False: no lock.
    lock_key: (
        str
        | Callable[..., str | Sequence[str]]
        | tuple[str | Callable[..., str | Sequence[str]] | Key, ...]
        | Literal[False]
        | None
    ) = declare(None, lock_key)
    #: Expiry of the lease, set when the lock is acquired and reset at each renewal. The watchdog
    #: renews after each third of it.
    lock_watchdog_timeout: float = declare(30.0, seconds(above=0), unit="s")
    #: The cap: number of renewals after which the watchdog stops, and `lock_on_cap` applies. 0 or
    #: less: no cap. 360 renewals of the default timeout take one hour.
    max_renew_times: int = declare(360, whole_number)
    #: A fixed expiry instead of the watchdog: set once, never renewed.
    lock_expire: float | None = declare(None, optional(seconds(above=0)), unit="s")
    #: False: when the body succeeds, the lock is left to expire.
    release_on_success: bool = declare(True, yes_or_no)
    #: False: when the body fails, the lock is left to expire. Retry, Ignore and Reject are not
    #: failures: they release the lock.
    release_on_failure: bool = declare(True, yes_or_no)
    #: Minimum time for which the lock is held, counted from its acquisition, even if the task ends
    #: sooner.
    lock_at_least_for: float = declare(0.0, seconds(at_least=0), unit="s")
    #: What a task does when its lock is held: `skip`, `raise`, `retry`, `wait`, `queue`, `cancel`,
    #: `reject`, or a callable that returns one of these names but `cancel`.
    lock_on_conflict: str | Callable[[Any, Any], str | None] = declare("skip", lock_on_conflict)
    #: Maximum wait with `lock_on_conflict='wait'`. On timeout the task fails as with `raise`.
    lock_wait_timeout: float = declare(10.0, seconds(at_least=0), unit="s")
    #: Maximum number of parked tasks per key with `lock_on_conflict='queue'`, not counting the one
    #: that runs or has its turn. None: no limit.
    lock_queue_limit: int | None = declare(None, optional(number_from(1)))
    #: Maximum total size of the messages that are parked per key.
    lock_queue_bytes: int = declare(2**26, number_from(1), unit="bytes")
    #: Which task is dropped when the line is full, and ends as REVOKED: `skip` drops the newcomer,
    #: `replace` the oldest in line.
    lock_queue_overflow: str = declare("skip", one_of("skip", "replace"))
    #: What happens to a running body when a newer task of its key waits for it: `warn`, `raise`
    #: (SupersededError in the body) or `terminate`. None: `raise` with `lock_on_conflict='cancel'`,
    #: else nothing.
    lock_on_cancel: str | None = declare(None, optional(one_of("warn", "raise", "terminate")))
    #: Time from telling the body until it is stopped as with `terminate`, if it still runs. None:
    #: it is not stopped.
    lock_cancel_after: float | None = declare(None, optional(seconds(above=0)), unit="s")
    #: Time from the acquisition during which the body is not told of a newer task.
    lock_cancel_not_before: float = declare(0.0, seconds(at_least=0), unit="s")
    #: Maximum time of retries with `lock_on_conflict='retry'`, counted from the first conflict.
    #: Then the task fails as with `raise`.
    lock_retry_for: float = declare(3600.0, seconds(above=0), unit="s")
    #: True: when the task retries, its lease is kept for the retry, until one timeout after the
    #: countdown. False: the lock is released before the retry is sent.
    lock_hold_on_retry: bool = declare(False, yes_or_no)
    #: True: a redelivery of a task that has already succeeded is acknowledged without running.
    lock_dedupe_redelivered: bool = declare(False, yes_or_no)
    #: How long `lock_dedupe_redelivered` remembers that a task has succeeded.
    lock_dedupe_for: float = declare(3600.0, seconds(above=0), unit="s")
    #: How often a task with `acks_late` and `reject_on_worker_lost` may kill its process: the last
    #: time it fails with TaskCrashedError. None: any number.
    lock_crash_limit: int | None = declare(None, optional(number_from(1)))
    #: What happens to a running body when its lease is lost: `warn` logs it, `raise` raises
    #: LockLostError in the body, `terminate` stops it even if it catches Exception.
    lock_on_lost: str = declare("warn", one_of("warn", "raise", "terminate"))
    #: What happens to a running body at the cap: `expire` lets the lease expire, and the body goes
    #: on; `raise` and `terminate` as for `lock_on_lost`.
    lock_on_cap: str = declare("expire", one_of("expire", "raise", "terminate"))
    #: Side of a read-write lock. `exclusive`: one lease at a time, or `lock_limit` of them.
    #: `shared`: any number, but none beside an exclusive one.
    lock_mode: str = declare("exclusive", one_of("exclusive", "shared"))
    #: Maximum number of exclusive leases at a time: a counting semaphore; or a callable with the
    #: task's arguments. None: the task takes no lock, and is only unique when it is sent
    #: (`lock_unique_until`).
    lock_limit: Limit = declare(1, optional(told_or(TERMS["limit"])))
    #: Maximum number of starts in any window, in the whole fleet: `'100/m'`, `'5/10s'`; of s, m, h
    #: and d; or a callable. Too early is a conflict. Without a `lock_limit`, any number may run.
    lock_rate: RateOf = declare(None, told_or(TERMS["rate"]))
    #: Units of the limit that a lease takes, and starts of the rate that it counts for: a number,
    #: `'<tokens>'` of an int argument, or a callable with the task's arguments. None: 1.
    lock_cost: Cost = declare(None, optional(told_or(lock_cost)))
    #: No second message of the key is sent. `start`: while one waits. `end`: while one waits or
    #: runs. `expiry`: for `lock_unique_for`, whatever becomes of the first. None: all are sent.
    lock_unique_until: str | None = declare(None, optional(one_of(*UNIQUE_UNTIL)))
    #: How long a key stays reserved if no worker renews the reservation, counted from the ETA or
    #: countdown if there is one.
    lock_unique_for: float = declare(3600.0, seconds(above=0), unit="s")
    #: What `delay()` does with a duplicate: `return` returns the first one's result, `raise` raises
    #: DuplicateTaskError, `replace` sends it and ends the older one as REVOKED, `sooner` does so if
    #: it is due before the one that waits, by more than a second.
    lock_on_duplicate: str = declare("return", one_of("return", "raise", "replace", "sooner"))
    #: With `lock_on_duplicate='replace'`: time from the first of a burst of messages until its
    #: newest is not postponed any more by an ETA or countdown. None: no limit.
    lock_replace_for: float | None = declare(None, optional(seconds(above=0)), unit="s")

    @cached_property
    def keys(self) -> tuple[str | Callable[..., str | Sequence[str]] | None, ...]:
        """The template or callable of each key; None: the task's name and all its arguments."""
        if self.lock_key is None or self.lock_key is False:
            return (None,)
        several = self.lock_key if isinstance(self.lock_key, tuple) else (self.lock_key,)
        return tuple(key.key if isinstance(key, Key) else key for key in several)

    @cached_property
    def declared(self) -> tuple[Key, ...]:
        """What is declared for each key, in the order of ``lock_key``; one if all have the same."""
        common = Key("", self.lock_limit or 1, self.lock_rate, self.lock_cost)  # type: ignore[arg-type]
        keys = self.lock_key if isinstance(self.lock_key, tuple) else ()
        if not any(isinstance(key, Key) for key in keys):
            return (common,)
        own = (key if isinstance(key, Key) else Key("") for key in keys)
        return tuple(
            Key(
                "",
                key.limit or (LIMIT_MOST if key.rate else common.limit),
                common.rate if key.rate is None else key.rate,
                common.cost if key.cost is None else key.cost,
            )
            for key in own
        )

    @cached_property
    def terms(self) -> tuple[Terms, ...]:
        """The terms of each key, as :attr:`declared`, as far as no call tells them."""
        return tuple(key.terms(self.lock_mode) for key in self.declared)

    @cached_property
    def limits_keys(self) -> bool:
        """Whether a key of ``lock_key`` has a limit of its own."""
        keys = self.lock_key if isinstance(self.lock_key, tuple) else ()
        return any(isinstance(key, Key) and key.limit is not None for key in keys)

    @cached_property
    def timeout(self) -> float:
        """Seconds after which a lease expires unless it is renewed."""
        return self.lock_expire or self.lock_watchdog_timeout

    @cached_property
    def renewal_interval(self) -> float | None:
        """Seconds between two renewals; None if leases are not renewed."""
        if self.lock_expire is not None:
            return None
        return self.lock_watchdog_timeout / RENEWALS_PER_TIMEOUT

    @cached_property
    def admits_several(self) -> bool:
        """Whether a key of the task may have several exclusive leases at a time."""
        return any(terms.limit > 1 for terms in self.terms)

    @cached_property
    def has_rate(self) -> bool:
        """Whether a key of the task has a rate."""
        return any(key.rate is not None for key in self.declared)

    @cached_property
    def newest_counts(self) -> bool:
        """Whether a message that comes while an older one runs must not be lost."""
        return self.lock_unique_until is not None and (
            self.lock_unique_until == "start" or self.lock_on_duplicate == "replace"
        )

    @cached_property
    def parks(self) -> bool:
        """Whether the task may be parked: its strategy says so, or a callable chooses."""
        return self.lock_on_conflict in IN_LINE or callable(self.lock_on_conflict)

    @cached_property
    def cancels(self) -> bool:
        """Whether a newer task of the key takes the place of an older one."""
        return self.lock_on_conflict == "cancel"

    @cached_property
    def on_cancel(self) -> str | None:
        """What happens to a body that a newer task waits for; None: nothing, the body goes on."""
        return self.lock_on_cancel or ("raise" if self.cancels else None)


# Options that have no effect unless another option has this value.
BELONG_TO: dict[str, tuple[str, Any]] = {
    "lock_wait_timeout": ("lock_on_conflict", "wait"),
    "lock_retry_for": ("lock_on_conflict", "retry"),
    "lock_queue_limit": ("lock_on_conflict", "queue"),
    "lock_queue_bytes": ("lock_on_conflict", "queue"),
    "lock_queue_overflow": ("lock_on_conflict", "queue"),
    "lock_dedupe_for": ("lock_dedupe_redelivered", True),
    "lock_watchdog_timeout": ("lock_expire", None),
    "max_renew_times": ("lock_expire", None),
    "lock_on_cap": ("lock_expire", None),
    "lock_limit": ("lock_mode", "exclusive"),
    "lock_replace_for": ("lock_on_duplicate", "replace"),
}

# The value that these options must have with lock_on_conflict="cancel", and the remedy.
NOT_CANCELLED: dict[str, tuple[Any, str]] = {
    "lock_expire": (None, "a renewal tells a task that it is cancelled: leave one of the two out"),
    "lock_hold_on_retry": (False, "a retry comes back to a newer task: leave one of the two out"),
}

# Options that have no effect unless another option is given.
NEED = {
    "lock_unique_for": "lock_unique_until",
    "lock_on_duplicate": "lock_unique_until",
}

# Options of other libraries, which have no effect here: whose, and what to do about them.
OF_OTHERS = {
    "unique_on": ("celery-singleton", "give lock_key and lock_unique_until='end'"),
    "raise_on_duplicate": (
        "celery-singleton",
        "give lock_on_duplicate='raise', or lock_on_conflict='raise'",
    ),
    "lock_expiry": ("celery-singleton", "give lock_unique_for, or lock_expire when running"),
    "challenge_lock_on_startup": ("celery-singleton", "leave it out, as locks end by themselves"),
    "simulate": ("celery-singleton", "leave it out, or set dislock_enabled=False"),
    "once": (
        "celery-once",
        "give lock_key, lock_unique_until, lock_on_duplicate and lock_unique_for",
    ),
    "heimdall": (
        "celery-heimdall",
        "give lock_key and lock_unique_until; for times and per, lock_rate",
    ),
}
MIGRATING = "https://celery-dislock.readthedocs.io/en/stable/migrating.html"  # option by option

# Names that an option of a task has elsewhere, with or without `lock_`.  Without it, Celery takes
# them for attributes of the task, and they would have no effect.
MEANT = {
    "key": "give lock_key",
    "lock": "give lock_key",
    "name": "give lock_key",
    "timeout": "give lock_wait_timeout, lock_watchdog_timeout or lock_expire",
    "blocking_timeout": "give lock_on_conflict='wait' and lock_wait_timeout",
    "ttl": "leave it out, as locks end by themselves, or give lock_expire for a fixed expiry",
    "lease_time": "leave it out, as leases are renewed, or give lock_expire for a fixed expiry",
    "auto_renewal": "leave it out, as leases are renewed, or give lock_expire for a fixed expiry",
    # Our own names of options of a lock in plain Python and of a Key, but what a task may well have
    # for itself: "mode" and "expire".
    **{name: f"give lock_{name}" for name in ("cost", "limit", "on_cap", "on_lost", "rate")},
}

# The only values of these options that several independent lock servers support.
QUORUM_VALUES = {
    "lock_mode": "exclusive",
    "lock_cost": None,  # without a limit and a rate it is refused by itself
    "lock_rate": None,  # before the limit, of which it leaves none
    "lock_limit": 1,
    "lock_unique_until": None,
}
