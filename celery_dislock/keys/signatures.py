"""How a callable takes the arguments of a task: as the task itself does, or in another way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NOT_GIVEN = inspect.Parameter.empty
NEVER_GIVEN = ("self", "cls", "args", "kwargs")  # given by other libraries to such callables
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Passed = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]

# Evaluated, annotations raise NameError from Python 3.14 on if only a type checker imports them.
AS_TEXT: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    AS_TEXT["annotation_format"] = annotationlib.Format.STRING


def passing(
    function: Callable[..., Any], signature: inspect.Signature, task_name: str
) -> Passed | None:
    """
    Find how a callable takes the arguments of a task.

    Args:
        function: The callable.
        signature: Signature of the task's function, without ``self``.
        task_name: Name of the task, for a TypeError.

    Returns:
        None: the callable takes the same arguments as the task, by position and by name, so it can
        be called like the task.  Otherwise a function that takes the arguments of a call, and
        returns them in the only way in which the callable takes them.

    Raises:
        ValueError: The callable does not take them; the message says what to give.
    """
    takes = _taken_by(function)
    if takes is None:
        return None
    given = [arg for arg in signature.parameters.values() if arg.kind not in VARIADIC]
    placed, named = (_accepts(takes, given, by_name=by_name) for by_name in (False, True))
    never = [arg for arg in _required(takes) if arg.name in NEVER_GIVEN]
    if [arg for arg in never if arg.name not in signature.parameters] or not (placed or named):
        raise ValueError(
            f"give a callable that takes the arguments of the task, {_without_types(signature)}; "
            f"this one takes {_without_types(takes)}"
        )
    if placed and named and _accepts(takes, _required(signature), by_name=False):
        return None
    bind = binder(signature, task_name)
    by_place = [arg.name for arg in given if not _is_named(arg, by_name=not placed)]
    by_name = [arg.name for arg in given if _is_named(arg, by_name=not placed)]
    others, extra = _name_of(signature, inspect.Parameter.VAR_POSITIONAL), keywords_name(signature)

    def passed(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        values = bind(*args, **kwargs)
        more = values.get(others, ())
        return (
            [*(values[name] for name in by_place), *more],
            {name: values[name] for name in by_name} | values.get(extra, {}),
        )

    return passed


def _taken_by(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a callable; None if it has none, as many built-in callables."""
    for follow in (False, True):  # what a decorator takes may differ from what it wraps
        try:
            return inspect.signature(function, follow_wrapped=follow, **AS_TEXT)
        except (TypeError, ValueError):
            pass
    return None


def _accepts(
    takes: inspect.Signature, given: Iterable[inspect.Parameter], *, by_name: bool
) -> bool:
    """Tell whether a signature takes these arguments, each as the parameter of its name."""
    args = [arg.name for arg in given if not _is_named(arg, by_name=by_name)]
    kwargs = {arg.name: arg.name for arg in given if _is_named(arg, by_name=by_name)}
    try:
        bound = takes.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    # Each value is the name of its argument.
    return all(value == name for name, value in bound.items() if name in {*args, *kwargs})


def _required(signature: inspect.Signature) -> list[inspect.Parameter]:
    given = signature.parameters.values()
    return [arg for arg in given if arg.default is NOT_GIVEN and arg.kind not in VARIADIC]


def _is_named(arg: inspect.Parameter, *, by_name: bool) -> bool:
    return arg.kind is arg.KEYWORD_ONLY or (by_name and arg.kind is arg.POSITIONAL_OR_KEYWORD)


def _without_types(signature: inspect.Signature) -> str:
    """Return a signature without its types, for a message."""
    bare = [arg.replace(annotation=NOT_GIVEN) for arg in signature.parameters.values()]
    return str(inspect.Signature(bare))


def keywords_name(signature: inspect.Signature) -> str:
    """Return the name of ``**kwargs``; empty if the signature has none."""
    return _name_of(signature, inspect.Parameter.VAR_KEYWORD)


def _name_of(signature: inspect.Signature, kind: Any) -> str:
    return "".join(arg.name for arg in signature.parameters.values() if arg.kind is kind)


def binder(signature: inspect.Signature, task_name: str) -> Callable[..., dict[str, Any]]:
    """
    Make a function of this signature that returns its arguments by name, defaults applied.

    Python binds the arguments of a call many times faster than `inspect.Signature.bind`.
    """
    given = list(signature.parameters.values())
    plain = [arg.replace(annotation=arg.empty, default=arg.empty) for arg in given]
    head = str(inspect.Signature(plain))[1:-1]
    body = ", ".join(f"{arg.name!r}: {arg.name}" for arg in given)
    bind: Any = eval(f"lambda {head}: {{{body}}}")  # noqa: S307 -- of names alone
    by_name = {arg.name for arg in given if arg.kind is arg.KEYWORD_ONLY}
    defaults = {arg.name: arg.default for arg in given if arg.default is not arg.empty}
    bind.__defaults__ = tuple(value for name, value in defaults.items() if name not in by_name)
    bind.__kwdefaults__ = {name: defaults[name] for name in defaults if name in by_name}
    bind.__qualname__ = task_name  # in the text of a TypeError
    return bind  # type: ignore[no-any-return]
