"""The terms of a key that only the arguments of a call tell: a limit, a rate or a cost."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from celery_dislock.config.options import TERMS
from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.keys.builders import ArgumentsCall
from celery_dislock.keys.signatures import binder
from celery_dislock.keys.templates import InvalidTemplate, KeyTemplate

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.config.terms import Terms


class CallTerms:
    """
    Tells the terms of a key for each call.

    Args:
        told: "limit", "rate" or "cost" -> a callable that takes the task's arguments; or, of a
            cost, the placeholder of an argument.
        signature: Signature of the task's function, without ``self``.
        task_name: Name of the task.

    Raises:
        SettingsError: A callable or a placeholder cannot be used.

    Attributes:
        reads: Names of the arguments that are read; None: all.
        tell_rule: Whether more than the cost is told: what other tasks of the key go by, too.
    """

    reads: frozenset[str] | None = None

    def __init__(
        self,
        told: Mapping[str, str | Callable[..., object]],
        signature: inspect.Signature,
        task_name: str,
    ) -> None:
        self.tell_rule = bool(told.keys() - {"cost"})
        self._calls: dict[str, tuple[str, Callable[..., Any]]] = {}
        for term, how in told.items():
            try:
                if isinstance(how, str):
                    template = KeyTemplate(how, signature, binder(signature, task_name))
                    self._calls[term], self.reads = (how, template.value), template.reads
                else:
                    call = ArgumentsCall(how, signature, task_name)
                    self._calls[term] = call.name, call
            except InvalidTemplate as exc:
                raise SettingsError(task_name, f"lock_{term}", how, str(exc)) from exc
        if any(map(callable, told.values())):
            self.reads = None

    def of(self, terms: Terms, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Terms:
        """
        Return the terms for a call, given those that are the same for all.

        Raises:
            Exception: LockKeyError: what was told is no limit, rate or cost, or a cost is more than
                the limit or the rate; or what a user's callable raises.
        """
        for term, (name, call) in self._calls.items():
            option = f"lock_{term}"
            try:
                told = call(args, kwargs)
            except LockKeyError as exc:
                raise LockKeyError(exc.template, exc.argument, exc.reason, option) from exc
            try:
                terms = terms._replace(**{term: TERMS[term](told)})
            except ValueError as exc:
                reason = f"{reprlib.repr(told)} is no {term}: {exc}"
                raise LockKeyError(name, None, reason, option) from exc
        if terms.too_much:
            reason = f"a cost of {terms.cost} is more than {terms.too_much}"
            raise LockKeyError(name, None, f"{reason}: it could never start", option)
        return terms
