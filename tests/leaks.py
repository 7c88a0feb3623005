"""Watch everything that the package says for the passwords that the tests use.

A test that needs a password uses :data:`SECRET`, or one that contains it; the fixture in
``tests/conftest.py`` looks for it in each log record and each of the package's errors.
"""

import contextlib
import logging
import pickle
import traceback
from collections import deque

from celery_dislock.exceptions import DislockError

SECRET = "s3cret"  # noqa: S105 -- what no text may contain
ESCAPED = "se:cr@et", "se%3Acr%40et"  # one with special characters, plain and in a URL
ERRORS = 500  # that are looked at, the newest


class Watch(logging.Handler):
    """Collects what is logged and raised."""

    def __init__(self):
        super().__init__()
        self.setFormatter(logging.Formatter())
        self.said = []
        self.errors = deque(maxlen=ERRORS)

    def emit(self, record):
        """Keep a record that tells a password, with its traceback."""
        said = self.format(record) if record.exc_info is None else _without_source(record)
        if _leaks(said):
            self.said.append(said)

    def leaks(self):
        """Return each text that has a password in it."""
        yield from self.said
        for error in self.errors:
            yield from (said for said in texts_of(error) if _leaks(said))


def texts_of(error):
    """Return what a log, a result backend or a debugger shows of an error, without source lines."""
    shown = error
    while shown is not None:
        yield f"{type(shown).__name__}: {shown}"
        yield repr(shown)
        yield "".join(traceback.format_exception_only(type(shown), shown))
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    with contextlib.suppress(Exception):  # what cannot be pickled cannot leak this way
        yield repr(pickle.dumps(error))


def _without_source(record):
    error = record.exc_info[1] if record.exc_info else None
    texts = [] if error is None else list(texts_of(error))
    return "\n".join([record.getMessage(), *texts])


def _leaks(said):
    return any(secret in said for secret in (SECRET, *ESCAPED))


def remember(watch, monkeypatch):
    """Let the watch have every error of the package that is made."""

    def made(kind, *args, **_):
        error = Exception.__new__(kind, *args)
        watch.errors.append(error)
        return error

    monkeypatch.setattr(DislockError, "__new__", made, raising=False)
