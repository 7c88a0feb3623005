"""Make what builds a task's keys: of a template, of a callable, or of all arguments."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import LockKeyError
from celery_dislock.keys.signatures import binder, passing
from celery_dislock.keys.templates import (
    Bind,
    DigestKey,
    InvalidTemplate,
    KeyBuilder,
    KeyTemplate,
    check_key,
    kind_of,
)

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Mapping, Sequence


def key_builder(
    declared: str | Callable[..., str | Sequence[str]] | None,
    *,
    signature: inspect.Signature,
    task_name: str,
    decorator: inspect.Signature | None = None,
    why_one: Callable[[], str] = str,
) -> KeyBuilder:
    """
    Check a declared ``lock_key``, and return its key builder.

    Args:
        declared: A template; a callable that takes the task's arguments and returns a whole key,
            or several; or None for the task's name and a digest of all its arguments.
        signature: Signature of the task's function, without ``self``.
        task_name: Name of the task, used if *declared* is None.
        decorator: Signature of a decorator that stands before the function, and may give it
            arguments of its own; None: there is none.
        why_one: Says why the task may have one key only; empty: it may have several.

    Raises:
        InvalidTemplate: *declared* cannot be used.
    """
    if callable(declared):
        return CallableKey(declared, signature, task_name, why_one)
    bind = binder(signature, task_name)
    if decorator is not None:
        bind = _decorated(bind, declared, binder(decorator, task_name))
    if declared is None:
        return DigestKey(task_name, bind)
    return KeyTemplate(declared, signature, bind)


def _decorated(bind: Bind, template: str | None, of_call: Bind) -> Bind:
    """
    Bind the arguments of a function to which a decorator may give some of its own.

    If a call lacks those, a *template* cannot be filled.  A digest is of what the call has.
    """

    def bound(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return bind(*args, **kwargs)
        except TypeError as error:
            if template is None:
                return of_call(*args, **kwargs)
            reason = (
                f"{error}; if a decorator gives the task an argument, set the __signature__ of the "
                "function that it returns, without that argument"
            )
            raise LockKeyError(template, None, reason) from error

    return bound


class ArgumentsCall:
    """
    Calls a user's callable with the arguments of a task; its exceptions are passed on unchanged.

    Args:
        function: The callable.
        signature: Signature of the task's function, without ``self``.
        task_name: Name of the task.

    Raises:
        InvalidTemplate: The callable does not take these arguments.

    Attributes:
        name: The callable's name, for messages.
    """

    def __init__(
        self, function: Callable[..., Any], signature: inspect.Signature, task_name: str
    ) -> None:
        self._function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        try:
            self._passed = passing(function, signature, task_name)
        except ValueError as exc:
            raise InvalidTemplate(str(exc)) from exc

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Return what the callable returns for a call of the task."""
        if self._passed is not None:
            args, kwargs = self._passed(*args, **kwargs)
        return self._function(*args, **kwargs)


class CallableKey(KeyBuilder):
    """The keys that a user's callable returns."""

    def __init__(
        self,
        function: Callable[..., str | Sequence[str]],
        signature: inspect.Signature,
        task_name: str,
        why_one: Callable[[], str] = str,
    ) -> None:
        self._made, self._task = ArgumentsCall(function, signature, task_name), task_name
        self._why_one = why_one

    def keys(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[str]:
        """Return the keys of a call; see `KeyBuilder.keys`."""
        made, name = self._made(args, kwargs), self._made.name
        keys = made if isinstance(made, (list, tuple)) else (made,)
        wrong = next((key for key in keys if not isinstance(key, str)), None)
        if not keys or wrong is not None or None in keys:
            what = f"a key is a str, not {kind_of(wrong)}" if keys else "a task has one at least"
            reason = f"it returned {reprlib.repr(made)} for task {self._task}; {what}"
            raise LockKeyError(name, None, reason)
        checked = [check_key(key, declared=name) for key in keys]
        if len(set(checked)) > 1 and (why := self._why_one()):
            reason = f"it returned {len(keys)} keys for task {self._task}; {why}"
            raise LockKeyError(name, None, reason)
        return checked
