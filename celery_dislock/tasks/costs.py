"""What a start costs, read of the arguments of one call, or made of them by a callable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.config.terms import LIMIT_MOST
from celery_dislock.exceptions import LockKeyError
from celery_dislock.keys.signatures import binder, passing
from celery_dislock.keys.templates import InvalidTemplate, KeyTemplate, kind_of

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Mapping, Sequence


class CallCost:
    """
    Tells what a call costs.

    Args:
        declared: The placeholder of an argument, or a callable that takes the task's arguments.
        signature: Signature of the task's function, without ``self``.
        task_name: Name of the task.

    Raises:
        InvalidTemplate: *declared* cannot be used.

    Attributes:
        reads: Names of the arguments that it reads; None: all.
    """

    reads: frozenset[str] | None = None

    def __init__(
        self, declared: str | Callable[..., int], signature: inspect.Signature, task_name: str
    ) -> None:
        self._of: Callable[[Sequence[Any], Mapping[str, Any]], object]
        if isinstance(declared, str):
            template = KeyTemplate(declared, signature, binder(signature, task_name))
            self._name, self._of, self.reads = declared, template.value, template.reads
            return
        self._name = getattr(declared, "__qualname__", None) or repr(declared)
        try:
            passed = passing(declared, signature, task_name)
        except ValueError as exc:
            raise InvalidTemplate(str(exc)) from exc

        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
            given, named = passed(*args, **kwargs) if passed is not None else (args, kwargs)
            return declared(*given, **named)

        self._of = call

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """
        Return the cost of a call.

        Raises:
            Exception: LockKeyError: this is no cost; or what a user's callable raises.
        """
        cost = self._of(args, kwargs)
        if not isinstance(cost, int) or isinstance(cost, bool):
            raise self.refused(f"a cost is an int, not {kind_of(cost)}")
        if not 0 < cost <= LIMIT_MOST:
            raise self.refused(f"a cost is 1 to {LIMIT_MOST:,}, not {cost:,}")
        return cost

    def refused(self, reason: str) -> LockKeyError:
        """Make the error of a cost."""
        return LockKeyError(self._name, None, reason)
