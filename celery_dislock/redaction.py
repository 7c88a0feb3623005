"""Describe an error of another library without showing a password.

redis-py writes connection arguments into some of its error messages, and which of them it hides
depends on its version.  Its messages are therefore not shown, apart from a few fixed texts.  The
description is the server's reply, the message of the operating system or of TLS, or the kind of
error.
"""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_MOST = 500  # characters of a reason
DEEPEST = 10  # errors of a cause chain that are read

ANSWERED = (ResponseError, AuthenticationError, BusyLoadingError)  # their text is the reply
NO_LOGIN = "HELLO must be called with the client already authenticated"
PLAIN = {"Connection closed by server.", "max number of clients reached"}  # harmless texts


class Ours(Exception):  # noqa: N818  # subclasses also derive from an error of redis-py
    """An error whose text this package wrote, so it can be shown."""


def reason_of(exc: BaseException) -> str:
    """Return what went wrong, in one short line that contains no password."""
    chain = list(_chain(exc))
    shown = next((error for error in chain if isinstance(error, (Ours, RedisError))), None)
    if shown is None:
        text = (_of_system(exc) if isinstance(exc, OSError) else "") or str(exc)
    elif isinstance(shown, Ours) or str(shown) in PLAIN:
        text = str(shown)
    elif isinstance(shown, ANSWERED):
        text = str(shown).partition(", with args")[0]  # which it quotes of an unknown command
        if text.startswith(NO_LOGIN):
            text = "Authentication required."  # as it says before the protocol is RESP3
    else:
        system = next((error for error in chain if isinstance(error, OSError)), None)
        text = (_of_system(system) if system else "") or _of_kind(shown)
    line = plain(" ".join((text or type(exc).__name__).split()))
    return line if len(line) <= LINE_MOST else f"{line[:LINE_MOST]}..."


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    for _ in range(DEEPEST):
        if exc is None:
            return
        yield exc
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)


def _of_system(exc: OSError) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"TLS: certificate verify failed: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS: {(exc.reason or 'failed').replace('_', ' ').lower()}"
    if isinstance(exc, TimeoutError):
        if "handshake" in str(exc):
            return "no answer to the TLS handshake; the port may be one without TLS"
        return "no answer in time"
    if exc.strerror:
        return exc.strerror
    return os.strerror(exc.errno) if exc.errno else ""


def _of_kind(exc: BaseException) -> str:
    if isinstance(exc, redis.TimeoutError):
        return "no answer in time"
    if isinstance(exc, redis.ConnectionError):
        return "the connection broke, or could not be made"
    return type(exc).__name__
