"""The types of a task that ``dislock.task(...)`` declares; nothing of this is used when it runs.

Celery has no types: any option of ``@app.task`` passes a type checker.  With these, a type checker
and an editor know the options by name, and the arguments and the result of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime, timedelta
    from typing import Generic, ParamSpec, TypeVar

    from celery_dislock.config.options import Key
    from celery_dislock.tasks.duplicates import Sent
    from celery_dislock.tasks.handle import LockHandle
    from celery_dislock.tasks.task import SingletonTask

    P = ParamSpec("P")
    R = TypeVar("R")

    # Makes a key, or several, of the task's arguments.
    Makes = Callable[..., str | Sequence[str]]


class LockOptions(TypedDict, total=False):
    """The options of :class:`celery_dislock.config.options.TaskOptions`, which describes them."""

    lock_key: (str | Key | Makes | Sequence[str | Key | Makes] | Literal[False]) | None
    lock_watchdog_timeout: float | timedelta
    max_renew_times: int
    lock_expire: float | timedelta | None
    release_on_success: bool
    release_on_failure: bool
    lock_at_least_for: float | timedelta
    lock_on_conflict: (
        Literal["skip", "raise", "retry", "wait", "queue", "cancel", "reject"]
        | Callable[[Any, Any], str | None]
    )
    lock_wait_timeout: float | timedelta
    lock_queue_limit: int | None
    lock_queue_bytes: int
    lock_queue_overflow: Literal["skip", "replace"]
    lock_on_cancel: Literal["warn", "raise", "terminate"] | None
    lock_cancel_after: float | timedelta | None
    lock_cancel_not_before: float | timedelta
    lock_retry_for: float | timedelta
    lock_hold_on_retry: bool
    lock_dedupe_redelivered: bool
    lock_dedupe_for: float | timedelta
    lock_crash_limit: int | None
    lock_on_lost: Literal["warn", "raise", "terminate"]
    lock_on_cap: Literal["expire", "raise", "terminate"]
    lock_mode: Literal["exclusive", "shared"]
    lock_limit: int | Callable[..., int] | None
    lock_rate: str | int | Callable[..., str | int | None] | None
    lock_cost: int | str | Callable[..., int] | None
    lock_unique_until: Literal["start", "end", "expiry"] | None
    lock_unique_for: float | timedelta
    lock_on_duplicate: Literal["return", "raise", "replace", "sooner"]
    lock_replace_for: float | timedelta | None


class DeclaredOptions(LockOptions, total=False):
    """The options of a task: ours, and Celery's but ``base`` and ``bind``."""

    name: str | None
    acks_late: bool
    acks_on_failure: bool
    acks_on_failure_or_timeout: bool
    acks_on_timeout: bool
    autoretry_for: Sequence[type[BaseException]]
    backend: Any
    compression: str | None
    default_retry_delay: float
    delivery_mode: int | str
    dont_autoretry_for: Sequence[type[BaseException]]
    exchange: Any
    expires: float | datetime | timedelta | None
    ignore_result: bool
    lazy: bool
    max_retries: int | None
    priority: int | None
    pydantic: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    pydantic_strict: bool
    queue: Any
    rate_limit: str | float | None
    reject_on_worker_lost: bool
    resultrepr_maxsize: int
    retry_backoff: bool | float
    retry_backoff_max: float
    retry_jitter: bool
    retry_kwargs: Mapping[str, Any]
    retry_on_worker_lost: bool
    routing_key: str | None
    send_events: bool
    serializer: str
    shared: bool
    soft_time_limit: float | None
    store_eager_result: bool
    store_errors_even_if_ignored: bool
    throws: tuple[type[BaseException], ...]
    time_limit: float | None
    track_started: bool
    trail: bool
    typing: bool


if TYPE_CHECKING:

    class LockedTask(SingletonTask, Generic[P, R]):
        """What ``dislock.task(...)`` makes of a function: a SingletonTask."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Run the body as a function, without the lock."""

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> Sent[R]:
            """Send the task."""

        def apply_async(
            self,
            args: Sequence[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> Sent[R]:
            """Send the task with these options of its message."""

        def s(self, *args: Any, **kwargs: Any) -> Any:
            """Make a signature, perhaps of some of the arguments only."""

        def si(self, *args: Any, **kwargs: Any) -> Any:
            """Make a signature that takes no result of an earlier task."""

        def lock_for(self, *args: P.args, **kwargs: P.kwargs) -> LockHandle:
            """Return the lock that the task takes for these arguments."""
