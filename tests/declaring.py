"""Declare the tasks of a test."""

import inspect

import pytest

from celery_dislock import SingletonTask


def does_nothing(doc=None): ...


def never(*_, **__):
    """Be the body of a task that must not run."""
    pytest.fail("its body runs")


def declare(app, body=does_nothing, **options):
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
