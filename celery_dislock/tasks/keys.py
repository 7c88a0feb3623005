"""The keys of a task's calls with their terms, built of the arguments as its body gets them.

The body of a task with ``pydantic=True`` gets models, which Celery makes of the arguments in the
message, with the models' defaults.  So the keys are built of these models, by the sender too, which
sends plain data.  Arguments that are not valid raise the error here that they raise in the worker.
"""

from __future__ import annotations

import inspect
import logging
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

from celery_dislock.config.settings import only_one_key
from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.keys.builders import CallableKey, key_builder
from celery_dislock.keys.signatures import AS_TEXT, VARIADIC
from celery_dislock.keys.templates import InvalidTemplate
from celery_dislock.tasks.received import Received
from celery_dislock.tasks.terms import CallTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

    from celery import Task

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.config.terms import Terms
    from celery_dislock.locks.runtime import Runtime

WARNED_MOST = 1000  # tasks that are remembered as warned of

logger = logging.getLogger("celery_dislock")


class TaskKeys:
    """
    Builds the keys of a task's calls.

    Args:
        name: The task's name.
        task: The task's class, bound to its app.
        options: The task's options.
        runtime: What the locks of the app share.

    Raises:
        SettingsError: ``lock_key``, or what tells a limit, a rate or a cost, cannot be used.

    Attributes:
        vary: Whether the arguments of a call tell terms of its keys.
        only: Returns the only key for the arguments as a message has them; None: there may be
            several keys, or the body gets other arguments.
    """

    def __init__(
        self, name: str, task: type[Task], options: TaskOptions, runtime: Runtime[Any]
    ) -> None:
        signature, called = signature_of(task), _signature(task, follow_wrapped=False)
        decorator = None if called == signature else called
        try:
            self._builders = [
                key_builder(
                    declared,
                    signature=signature,
                    task_name=name,
                    decorator=decorator,
                    why_one=lambda: only_one_key(options, runtime.conf)[1],
                )
                for declared in options.keys
            ]
        except InvalidTemplate as exc:
            raise SettingsError(name, "lock_key", options.lock_key, str(exc)) from exc
        for declared, builder in zip(options.keys, self._builders, strict=True):
            for refused in refused_defaults(declared, builder.paths, signature):
                _warn_of_default(name, str(refused))
        self._terms = options.terms
        self._calls = {  # by place in `terms`, of those that calls tell
            nth: CallTerms(key.told, signature, name)
            for nth, key in enumerate(options.declared)
            if key.told
        }
        self._declared = options.keys
        each = self._terms * (len(self._builders) // len(self._terms))
        self._ranks = [
            (builder.reads == frozenset(), terms.breadth)
            for builder, terms in zip(self._builders, each, strict=True)
        ]
        self._received = Received([*self._builders, *self._calls.values()], signature)
        self._validate = getattr(task.run, "dislock_validate", None)
        self._before = () if _is_static(task) else (None,)  # for `self`
        first, *more = self._builders
        self.vary = bool(self._calls)
        is_plain = not (more or isinstance(first, CallableKey) or self._validate or self._calls)
        self.only = first.key if is_plain else None

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str = ""
    ) -> list[Sequence[str]]:
        """
        Return the keys for these arguments: those of each template or callable of ``lock_key``.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            serializer: The serializer with which a caller will send the arguments; empty: they
                have come with a message.

        Raises:
            Exception: No keys can be built: LockKeyError, or what a user's callable or the
                validation raises.
        """
        if serializer:
            args, kwargs = self._received.of(args, kwargs, serializer)
        if self._validate is None:
            return [builder.keys(args, kwargs) for builder in self._builders]
        given, named = self._validate(*self._before, *args, **kwargs)
        given = given[len(self._before) :]
        if self._declared != (None,):
            return [builder.keys(given, named) for builder in self._builders]
        (digest,) = self._builders
        try:
            plain = {name: _dumped(value) for name, value in named.items()}
            return [digest.keys([*map(_dumped, given)], plain)]
        except LockKeyError:  # a model may have what cannot be digested
            return [digest.keys(args, kwargs)]

    def terms_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Terms, ...]:
        """
        Return the terms of each key for these arguments, or one for all.

        Only called if they :attr:`vary`.  May block in a user's callable.

        Raises:
            Exception: See :meth:`CallTerms.of`; or what the validation raises.
        """
        if self._validate is not None:
            args, kwargs = self._validate(*self._before, *args, **kwargs)
            args = args[len(self._before) :]
        terms = list(self._terms)
        for nth, call in self._calls.items():
            terms[nth] = call.of(terms[nth], args, kwargs)
        return tuple(terms)

    def declared_order(self) -> Sequence[str]:
        """
        Return the templates of several keys in the order in which their locks are taken.

        Empty if there is one key, or if a callable makes one of them: its keys are not known yet.
        """
        declared = [[key] for key in self._declared if isinstance(key, str)]
        is_known = len(declared) == len(self._declared) > 1
        return self.in_order(declared, self._terms)[0] if is_known else ()

    def terms_at(self, key: str) -> Terms | None:
        """
        Return the terms on which calls of the task take the lock of this key.

        None if only the arguments of a call tell that, or if no call has this key.  Without a cost,
        which each task in line has for itself.
        """
        several = len(self._terms) > 1
        places = [
            nth
            for nth, builder in enumerate(self._builders[: len(self._terms)])
            if not (several and builder.pattern) or builder.pattern.fullmatch(key)
        ]
        if any(self._calls[nth].tell_rule for nth in places if nth in self._calls):
            return None
        found = {self._terms[nth]._replace(cost=None) for nth in places}
        return found.pop() if len(found) == 1 else None

    def in_order(
        self, built: Sequence[Sequence[str]], terms: Sequence[Terms]
    ) -> tuple[Sequence[str], tuple[Terms, ...]]:
        """
        Return the keys of a call in the order in which its locks are taken, and their terms.

        Narrow ones come before wide ones: keys made from arguments, then fixed keys; of each kind,
        first those whose terms let few tasks pass, as declared.  So the tasks of a busy tenant wait
        in its own line.  What a call tells does not count there: with a number that changes, two
        calls could wait for each other.  Of two terms of a task for one key, the stricter count.

        Args:
            built: The keys of each template or callable, in the order of ``lock_key``.
            terms: The terms of each template or callable, or one for all.
        """
        if len(built) == len(built[0]) == 1:
            return built[0], (*terms,)
        strictest: dict[str, Terms] = {}
        ranks: dict[str, tuple[Any, ...]] = {}
        each = terms if len(terms) == len(built) else [*terms] * len(built)
        for keys, key_terms, rank in zip(built, each, self._ranks, strict=True):
            for key in keys:
                strictest[key] = key_terms.stricter(strictest.get(key, key_terms))
                ranks[key] = tuple(map(min, rank, ranks.get(key, rank)))
        ordered = sorted(strictest, key=lambda key: (ranks[key], key))
        theirs = tuple(strictest[key] for key in ordered)
        return ordered, theirs[:1] if len(set(theirs)) == 1 else theirs


def _dumped(argument: Any) -> Any:
    """Return the plain data of a model, and any other argument as it is."""
    return argument.model_dump() if hasattr(type(argument), "model_dump") else argument


def signature_of(task: type[Task]) -> inspect.Signature:
    """
    Return the signature of a task's body, without ``self``.

    If its decorator takes any arguments, it is that of the function which the decorator has
    wrapped, by ``functools.wraps``.
    """
    called = _signature(task, follow_wrapped=False)
    takes_any = any(parameter.kind in VARIADIC for parameter in called.parameters.values())
    return _signature(task, follow_wrapped=True) if takes_any else called


def _signature(task: type[Task], *, follow_wrapped: bool) -> inspect.Signature:
    signature = inspect.signature(task.run, follow_wrapped=follow_wrapped, **AS_TEXT)
    takes = list(signature.parameters.values())
    if _is_static(task) or (takes and takes[0].kind is inspect.Parameter.VAR_POSITIONAL):
        return signature  # with `*args`, which has the task in a task with bind=True
    return signature.replace(parameters=takes[1:])


def _is_static(task: type[Task]) -> bool:
    return isinstance(inspect.getattr_static(task, "run"), staticmethod)


def refused_defaults(
    template: Any, paths: Sequence[str], signature: inspect.Signature
) -> Iterator[LockKeyError]:
    """
    Yield an error for each placeholder of a template that the argument's default cannot fill.

    A key is built of each default alone, in the way in which the keys of calls are built.
    """
    for path in paths:
        argument = signature.parameters.get(path.partition(".")[0])
        if argument is None or argument.default is argument.empty:
            continue
        own = f"<{path}>"  # beside anything else, its text may be empty
        alone = signature.replace(parameters=[argument])
        builder = key_builder(own if own == template else f":{own}", signature=alone, task_name="")
        try:
            builder.key((), {})
        except LockKeyError as error:
            yield LockKeyError(template, path, error.reason)


# An error would stop an app whose calls all give the argument.  A word of its own for None would
# let calls that have forgotten the argument share one lock.
@lru_cache(WARNED_MOST)
def _warn_of_default(name: str, refused: str) -> None:
    #: WARNING: A key cannot have the argument's default, so each call without it ends with
    #: LockKeyError; once per process. -> Give it no default, or one that a key may have.
    logger.warning(
        "Task %s fails in each call without the argument: %s; give the argument no default, or one "
        "that a key may have.",
        *(name, refused),
    )


def validating(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """
    Extend the function with which Celery wraps the body of a task with ``pydantic=True``.

    Args:
        wrap: That function.  It takes the app, the body and more, and returns the wrapped body.

    Returns:
        A function like *wrap*.  The body that it wraps has the attribute ``dislock_validate``: a
        function that returns the arguments as the body gets them.
    """

    @wraps(wrap)
    def wrapped(app: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        @wraps(body)  # Celery reads the types of its arguments
        def given(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return args, kwargs

        made = wrap(app, body, *args, **kwargs)
        made.dislock_validate = wrap(app, given, *args, **kwargs)
        return made

    return wrapped


def warn_of_orders(
    name: str, order: Sequence[str], orders: MutableMapping[str, Sequence[str]]
) -> None:
    """Log that two tasks of an app take the same locks in different orders.

    Args:
        name: A task.
        order: The task's keys, in the order in which it takes them.
        orders: The orders of the tasks that were bound before, by task; this one is added.
    """
    for other, other_order in orders.items():
        mine, theirs = (
            [key for key in order if key in other_order],
            [key for key in other_order if key in order],
        )
        if other != name and mine != theirs:
            #: WARNING: Two tasks of one app may wait for each other, until the sweep lets one begin
            #: anew. -> Give these keys the same limits in both.
            logger.warning(
                "Tasks %s and %s take the locks %s in different orders, as their limits differ, "
                "and may wait for each other: give these keys the same limits in both.",
                *(other, name, ", ".join(map(repr, mine))),
            )
    orders[name] = order
