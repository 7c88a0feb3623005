"""Watch everything that the package says for the passwords that the tests use.

A test that needs a password uses :data:`SECRET`, or one that contains it; the fixture in
``tests/conftest.py`` looks for it in each log record and each of the package's errors.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import DislockError

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "s3cret"  # noqa: S105 -- what no text may contain
ESCAPED = "se:cr@et", "se%3Acr%40et"  # one with special characters, plain and in a URL
ERRORS = 500  # that are looked at, the newest


class Watch(logging.Handler):
    """Collects what is logged and raised."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter())
        self.said: list[str] = []
        self.errors: deque[DislockError] = deque(maxlen=ERRORS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that tells a password, with its traceback."""
        said = self.format(record) if record.exc_info is None else _without_source(record)
        if _leaks(said):
            self.said.append(said)

    def leaks(self) -> Iterator[str]:
        """Return each text that has a password in it."""
        yield from self.said
        for error in self.errors:
            yield from (said for said in texts_of(error) if _leaks(said))


def texts_of(error: BaseException) -> Iterator[str]:
    """Return what a log, a result backend or a debugger shows of an error, without source lines."""
    shown: BaseException | None = error
    while shown is not None:
        yield f"{type(shown).__name__}: {shown}"
        yield repr(shown)
        yield "".join(traceback.format_exception_only(type(shown), shown))
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    with contextlib.suppress(Exception):  # what cannot be pickled cannot leak this way
        yield repr(pickle.dumps(error))


def _without_source(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    texts = [] if error is None else list(texts_of(error))
    return "\n".join([record.getMessage(), *texts])


def _leaks(said: str) -> bool:
    return any(secret in said for secret in (SECRET, *ESCAPED))


def remember(watch: Watch, monkeypatch: Any) -> None:
    """Let the watch have every error of the package that is made."""

    def made(kind: type[DislockError], *args: Any, **_: Any) -> DislockError:
        error: DislockError = Exception.__new__(kind, *args)
        watch.errors.append(error)
        return error

    monkeypatch.setattr(DislockError, "__new__", made, raising=False)
