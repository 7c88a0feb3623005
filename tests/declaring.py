"""Declare the tasks of a test."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from celery_dislock import SingletonTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery


def does_nothing(doc: Any = None) -> None: ...


def never(*_: Any, **__: Any) -> None:
    """Be the body of a task that must not run."""
    pytest.fail("its body runs")


def declare(app: Celery, body: Callable[..., Any] = does_nothing, **options: Any) -> Any:
    """
    Declare a task of one app alone, which locks; return it.

    Args:
        app: The app.
        body: Its body.  It gets the task, if its first argument is called ``self``.
        options: Options of the task.  Without a key it is "k", and without a name "shop.t".
    """
    if body.__name__ == "<lambda>":
        body.__name__ = "body"  # Celery defines a function of that name
    bind = next(iter(inspect.signature(body).parameters), "") == "self"
    defaults = {"base": SingletonTask, "name": "shop.t", "lock_key": "k", "bind": bind}
    return app.task(**{**defaults, "shared": False, **options})(body)
