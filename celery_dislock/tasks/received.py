"""The arguments of a call as the worker gets them, after their way through a serializer.

A lock's key is built from the arguments that the task gets: JSON turns the key 1 of a dict into
"1", a tuple into a list, and an object into what its ``__json__`` returns.  No rule of ours could
cover all types that users register with their serializer, so the arguments pass through it here,
too.  Text and numbers, which no serializer changes, and arguments that no key reads stay as they
are.
"""

from __future__ import annotations

import inspect
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from kombu.serialization import dumps, loads

from celery_dislock.locks.interruption import THROWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery_dislock.keys.templates import KeyBuilder
    from celery_dislock.tasks.terms import CallTerms

# Types that no serializer changes.  Subclasses of them may be changed.
UNCHANGED: set[type] = {str, int, float, bool, type(None)}


class Received:
    """
    Converts the arguments that a task's keys are built from to what a worker gets.

    Args:
        builders: Build the keys, and tell their terms.
        signature: Signature of the task's function, without ``self``.
    """

    def __init__(
        self, builders: Iterable[KeyBuilder | CallTerms], signature: inspect.Signature
    ) -> None:
        given = signature.parameters.values()
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        self._names = [parameter.name for parameter in given if parameter.kind not in by_name]
        self._reads = [builder.reads for builder in builders]

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """
        Return the arguments of a call, with those that a key reads as the worker gets them.

        An argument that cannot be serialized is left as it is: its message cannot be sent anyway.
        """
        names = chain(self._names, repeat(self._names[-1] if self._names else ""))  # of *args
        return (
            [self._one(name, value, serializer) for name, value in zip(names, args, strict=False)],
            {name: self._one(name, value, serializer) for name, value in kwargs.items()},
        )

    def _one(self, name: str, value: Any, serializer: str) -> Any:
        if type(value) in UNCHANGED or not any(it is None or name in it for it in self._reads):
            return value
        try:
            content_type, encoding, data = dumps([value], serializer)
            (received,) = loads(data, content_type, encoding, accept={content_type})
        except Exception as exc:  # noqa: BLE001 -- any of the serializer's
            for error in (exc, *exc.args):  # kombu wraps what a serializer raises
                if isinstance(error, THROWN):
                    raise error from None
            return value
        return received
