"""What messages say about the errors of other libraries."""

import pickle
import socket
import ssl
import traceback

import pytest
import redis
from kombu.exceptions import OperationalError

from celery_dislock.exceptions import StoreError
from celery_dislock.redaction import LINE_MOST, reason_of
from celery_dislock.servers.connections import Demoted, store_error
from tests.leaks import SECRET


def raised_from(exc, cause):
    exc.__cause__ = cause
    return exc


def raised_while(exc, context):
    exc.__context__ = context
    return exc


def ask(exc):
    """Fail as what asks a server does."""
    try:
        raise exc
    except type(exc) as caught:
        raise store_error("redis://a", caught) from None


REFUSED = ConnectionRefusedError(111, "Connection refused")
UNVERIFIED = ssl.SSLCertVerificationError(1, "[SSL] certificate verify failed")
UNVERIFIED.verify_message = "self-signed certificate"
BAD_TLS = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
BAD_TLS.reason = "WRONG_VERSION_NUMBER"


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (redis.ResponseError("OOM command not allowed"), "OOM command not allowed"),
        (redis.exceptions.NoPermissionError("no permissions to run 'blpop'"), "no permissions"),
        (redis.AuthenticationError("invalid username-password pair"), "invalid username-password"),
        (
            redis.AuthenticationError(
                "HELLO must be called with the client already authenticated, otherwise the HELLO "
                "AUTH <user> <pass> option can be used"
            ),
            "Authentication required.",
        ),
        (redis.BusyLoadingError("Redis is loading the dataset"), "loading"),
        (redis.ConnectionError("Connection closed by server."), "Connection closed by server."),
        (raised_from(redis.ConnectionError("Error 111 to x"), REFUSED), "Connection refused"),
        (raised_while(redis.ConnectionError("Error 111 to x"), REFUSED), "Connection refused"),
        (raised_from(redis.ConnectionError("x"), UNVERIFIED), "self-signed certificate"),
        (raised_from(redis.ConnectionError("x"), BAD_TLS), "TLS: wrong version number"),
        (redis.TimeoutError("Timeout reading from socket"), "no answer in time"),
        (
            raised_while(redis.TimeoutError("x"), TimeoutError("The handshake timed out")),
            "TLS handshake",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (Demoted("it is a replica"), "it is a replica"),
        (OSError("Server unexpectedly closed connection"), "Server unexpectedly closed connection"),
        (StoreError("redis://a", "away"), "lock server redis://a: away"),
        (KeyError(), "KeyError"),
    ],
)
def test_what_is_harmless_is_said(exc, said):
    """A reason is in the words of the server, the system or TLS, or names the kind of error."""
    assert said in reason_of(exc)


@pytest.mark.parametrize(
    "exc",
    [
        redis.sentinel.MasterNotFoundError(f"No master found : Redis(password={SECRET})"),
        redis.ConnectionError(f"Redis(password={SECRET})"),
        redis.TimeoutError(f"Redis(password={SECRET})"),
        redis.InvalidResponse(f"Protocol Error: b'AUTH {SECRET}'"),
        redis.DataError(f"Invalid input: {SECRET}"),
        redis.ResponseError(f"unknown command 'AUTH', with args beginning with: '{SECRET}' "),
        raised_from(
            OperationalError(f"Redis(password={SECRET})"),
            redis.ConnectionError(f"Redis(password={SECRET})"),
        ),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_no_text_of_redis_py_is_told(exc):
    """Whatever redis-py writes about its connections is in no text that is made of a StoreError."""
    assert SECRET not in reason_of(exc)
    with pytest.raises(StoreError) as raised:
        ask(exc)
    error = raised.value
    assert error.raw is exc
    told = [line for line in traceback.format_exception(error) if not line.startswith("  File")]
    assert not any(SECRET in text for text in [str(error), repr(error), *told])
    assert SECRET.encode() not in pickle.dumps(error)
    assert pickle.loads(pickle.dumps(error)).raw is None


def test_a_reason_is_one_line_of_bounded_length():
    """Line breaks and long answers of a server do not fill the log."""
    told = reason_of(redis.ResponseError("a\nb\r\n" + "c" * 10_000))
    assert told.startswith("a b ccc")
    assert len(told) == LINE_MOST + len("...")
