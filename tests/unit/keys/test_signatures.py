"""How a callable is given the arguments of a task, and which callables are refused."""

import functools
import inspect

import pytest

from celery_dislock.keys.signatures import binder, passing

TASK = "shop.export"


def export(corp_id, since=None): ...


def keyword_only(corp_id, /, *, since=None): ...


def variadic(corp_id, *more, **others): ...


class Builder:
    """Builds keys, in all the ways that a callable may have."""

    def __call__(self, corp_id, since=None):
        return f"{corp_id} {since}"

    def method(self, corp_id, since=None):
        return f"{corp_id} {since}"

    @staticmethod
    def static(corp_id, since=None):
        return f"{corp_id} {since}"


class Text(str):
    """A key that is made as an object of its class."""

    __slots__ = ()

    def __new__(cls, corp_id, since=None):
        return super().__new__(cls, f"{corp_id} {since}")


def prefixed(prefix, corp_id, since=None):
    return f"{corp_id} {since}{prefix}"


def taking(parameters):
    """Make a callable of these parameters."""
    return eval(f"lambda {parameters}: 'k'")  # noqa: S307 -- of this file


def called(function, task, *args, **kwargs):
    """Return what a callable returns for a call of a task."""
    passed = passing(function, inspect.signature(task), TASK)
    if passed is not None:
        args, kwargs = passed(*args, **kwargs)
    return function(*args, **kwargs)


CALLS = [((7, 1), {}), ((7,), {"since": 1}), ((), {"since": 1, "corp_id": 7})]


@pytest.mark.parametrize(
    "function",
    [
        lambda corp_id, since: f"{corp_id} {since}",
        lambda corp_id, since, extra="": f"{corp_id} {since}{extra}",
        lambda since, corp_id: f"{corp_id} {since}",
        lambda c, s: f"{c} {s}",
        lambda corp_id, **others: f"{corp_id} {others['since']}",
        lambda *, since, corp_id: f"{corp_id} {since}",
        lambda *values: " ".join(map(str, values)),
        lambda **values: f"{values['corp_id']} {values['since']}",
        Builder(),
        Builder().method,
        Builder.static,
        vars(Builder)["static"],
        Text,
        functools.partial(prefixed, ""),
        functools.partial(prefixed, prefix=""),
        functools.lru_cache(lambda corp_id, since: f"{corp_id} {since}"),
    ],
)
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_a_callable_gets_the_arguments_of_each_call_that_the_task_takes(function, args, kwargs):
    """By position or by name, in any order, in the way in which it takes them."""
    assert called(function, export, *args, **kwargs) == "7 1"


@pytest.mark.parametrize(("args", "kwargs"), [((7,), {}), ((), {"corp_id": 7})])
def test_what_is_left_out_has_the_tasks_default(args, kwargs):
    """The callable need not know it."""
    assert called(lambda corp_id, since: f"{corp_id} {since}", export, *args, **kwargs) == "7 None"
    assert called(lambda c, s: f"{c} {s}", export, *args, **kwargs) == "7 None"


def test_arguments_of_each_kind_are_passed():
    """Positional ones, those after a star, and those that a task takes beside its own."""
    assert called(lambda c, *, since: f"{c} {since}", keyword_only, 7, since=1) == "7 1"
    assert called(lambda c, *m, **o: f"{c}{m}{o}", variadic, 7, 8, a=9) == "7(8,){'a': 9}"
    with pytest.raises(TypeError):
        called(lambda c: f"{c}", variadic, 7, 8)


@pytest.mark.parametrize(
    "takes",
    [
        *("self, corp_id, since=None", "args, kwargs", "", "corp_id", "corp_id, since, until"),
        "corp_id, kwargs, since=None",
    ],
)
@pytest.mark.parametrize("wrapped", [lambda function: function, functools.lru_cache])
def test_a_callable_that_cannot_take_them_is_refused(takes, wrapped):
    """Before any call; the message has both signatures."""
    with pytest.raises(ValueError, match="give a callable") as caught:
        passing(wrapped(taking(takes)), inspect.signature(export), TASK)
    assert str(caught.value) == (
        "give a callable that takes the arguments of the task, (corp_id, since=None); this one "
        f"takes ({takes})"
    )


def test_a_task_may_have_arguments_of_any_name():
    """Also those that callables of other libraries are given."""

    def task(args, kwargs): ...

    assert called(lambda args, kwargs: f"{args}{kwargs}", task, 1, kwargs=2) == "12"


@pytest.mark.parametrize("function", [str, max, taking("*args, **kwargs")])
def test_a_callable_of_which_nobody_knows_what_it_takes_is_called_as_the_task_is(function):
    """A built-in one without a signature, and one that takes anything, and may look at it."""
    assert passing(function, inspect.signature(export), TASK) is None


def test_an_argument_that_does_not_fit_is_an_error_that_names_the_task():
    """As of a call of the task itself."""
    with pytest.raises(TypeError, match=r"^shop\.export\(\) missing 1 required"):
        binder(inspect.signature(export), TASK)()
