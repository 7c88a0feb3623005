"""Show people an option's value without any password, or anything that may contain one.

Whoever reports errors, such as Sentry, reports the local variables of all frames, too.  So an error
about a setting leaves the functions that have read URLs without their frames: see :func:`alone`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from celery_dislock.config.urls import HIDDEN, harmless, shown
from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

A = ParamSpec("A")
T = TypeVar("T")

# If a name contains one of these, its value is never shown.
SECRETS = ("pass", "secret", "token", "credential", "transport_option", "kwargs")


def refused(owner: str, name: str, value: object, remedy: str) -> SettingsError:
    """Make the error about an option, without any password in its value."""
    return SettingsError(owner, name, censored(name, value), remedy)


def checked(owner: str, name: str, check: Callable[[Any], T], value: object) -> T:
    """Return the value of an option as its check does; raise the error about it."""
    try:
        return check(value)
    except ValueError as exc:
        raise refused(owner, name, value, str(exc)) from exc


def alone(function: Callable[A, T]) -> Callable[A, T]:
    """
    Let a SettingsError of *function* come without what was below.

    The frames of the function and of all that it calls, and the errors that led to this one, have
    URLs or the app's configuration among their variables.  The error's text has no password.
    """

    @wraps(function)
    def without_frames(*args: A.args, **kwargs: A.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except SettingsError as exc:
            error = exc
        del args, kwargs
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None)

    return without_frames


def in_place_of_app(given: object) -> object:
    """Return what was given in place of an app, for a message: perhaps its name, or a URL."""
    if isinstance(given, str) and given.replace(".", "_").isidentifier():
        return given
    return censored("url" if isinstance(given, (str, list, tuple)) else "app", given)


def reported(name: str, value: object) -> object:
    """Return a setting for a report to people; one of this package without any password."""
    return censored(name, value) if "dislock" in name.lower() else value


def censored(name: str, value: object) -> object:
    """Hide values that may be secret: by the name of their option, and passwords in URLs."""
    if isinstance(value, Mapping):
        inner = {key: censored(str(key), item) for key, item in value.items()}
        if _is_secret(name):  # any text within connection options may be a password
            return {key: harmless(text) for key, text in inner.items()}
        return inner
    if _is_secret(name) or (isinstance(value, bytes) and b"://" in value):
        return HIDDEN
    if "url" in name.lower() or (isinstance(value, str) and "://" in value):
        return shown(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [censored(name, item) for item in value]
    return value


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in SECRETS)
