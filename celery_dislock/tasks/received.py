"""The arguments of a call as the worker gets them, after their way through a serializer.

The key of a message is built from what its task gets: JSON makes the key 1 of a dict "1", a tuple a
list, and an object whatever its ``__json__`` says.  No rule of ours about types could know all that
users register with their serializer, so the arguments take the same way.  Most are text and
numbers, which no serializer changes: they are left as they are, as are those that no key reads.
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

UNCHANGED: set[type] = {str, int, float, bool, type(None)}  # but not their subclasses


class Received:
    """
    What a worker gets of the arguments that a task's keys are built from.

    Args:
        builders: Build the keys.
        signature: Signature of the task's function, without ``self``.
    """

    def __init__(self, builders: Iterable[KeyBuilder], signature: inspect.Signature) -> None:
        given = signature.parameters.values()
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        self._names = [one.name for one in given if one.kind not in by_name]
        self._reads = [one.reads for one in builders]

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """
        Return the arguments of a call, those that a key reads as the worker gets them.

        What cannot be serialized is left as it is: such a message is not sent.
        """
        if UNCHANGED.issuperset(map(type, (*args, *kwargs.values()))):
            return args, kwargs
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
            for one in (exc, *exc.args):  # kombu wraps what a serializer raises
                if isinstance(one, THROWN):
                    raise one from None
            return value
        return received
