"""Sessions of the page: signed cookies, tokens of their forms, and how often one may try to log in.

A session is a cookie: user, end, a random number, and a MAC over them.  The server keeps none, so a
restart with the same secret ends none.  The key of the MAC has the user's stored password in it:
a new password ends the user's sessions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import secrets
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.operating.web.http import Request

COOKIE = "dislock_session"
SESSION = 8 * 3600.0  # seconds after which one has to log in again
SECRET_LEAST = 16  # bytes of a secret that is given
ENDED_MOST = 10_000  # sessions that were ended by their users and are remembered

PER_ADDRESS = 5  # attempts to log in that fail, of one address, within WINDOW
OVERALL = 100  # the same, of all addresses together
WINDOW = 300.0  # seconds
ADDRESSES_MOST = 1000  # that are remembered
NETWORK_6 = 64  # bits of an IPv6 address that one customer shares

_COOKIE = re.compile(r"1\.([A-Za-z0-9_-]{0,400})\.(\d{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class Session(NamedTuple):
    """
    Who is logged in.

    Attributes:
        user: The name.
        ends: UNIX time.
        nonce: Tells this session from the user's others.
    """

    user: str
    ends: int
    nonce: str


class Sessions:
    """
    Makes and checks the cookies of sessions.  Thread-safe.

    Args:
        secret: Signs them, at least :data:`SECRET_LEAST` bytes.
        stamp: Returns bytes that change with the user's password; None if there is no such user.
        seconds: For how long a session lasts.
        clock: UNIX time.
    """

    def __init__(
        self,
        secret: bytes,
        stamp: Callable[[str], bytes | None],
        *,
        seconds: float = SESSION,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._stamp = stamp
        self._seconds = seconds
        self._clock = clock
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._mutex = threading.Lock()

    def begin(self, user: str) -> tuple[Session, str]:
        """Return a new session, and its cookie."""
        session = Session(user, int(self._clock() + self._seconds), secrets.token_hex(16))
        name = base64.urlsafe_b64encode(user.encode("utf-8", "surrogatepass")).decode()
        body = f"1.{name.rstrip('=')}.{session.ends}.{session.nonce}"
        return session, f"{body}.{self._mac(b'cookie', session, self._stamp(user) or b'')}"

    def of(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None if it is over, or no session of ours."""
        found = _COOKIE.fullmatch(cookie)
        if found is None:
            return None
        name, ends, nonce, mac = found.groups()
        try:
            user = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except (binascii.Error, ValueError):
            return None
        session = Session(user, int(ends), nonce)
        stamp = self._stamp(user)
        right = self._mac(b"cookie", session, stamp or b"")
        is_ours = hmac.compare_digest(right, mac) and stamp is not None
        if not is_ours or self._clock() >= session.ends or nonce in self._ended:
            return None
        return session

    def token(self, session: Session) -> str:
        """Return the token that each form of this session must carry."""
        return self._mac(b"form", session, b"")

    def is_token(self, session: Session, given: str) -> bool:
        """Tell whether a form carries the token of this session."""
        return hmac.compare_digest(self.token(session).encode(), given.encode("utf-8", "replace"))

    def end(self, session: Session) -> None:
        """End a session before its time."""
        with self._mutex:
            self._ended[session.nonce] = None
            while len(self._ended) > ENDED_MOST:
                self._ended.popitem(last=False)

    def _mac(self, purpose: bytes, session: Session, stamp: bytes) -> str:
        key = hashlib.sha256(b"%d.%b.%b" % (len(self._secret), self._secret, stamp)).digest()
        told = f"{session.ends}.{session.nonce}.{session.user}".encode("utf-8", "surrogatepass")
        return hmac.new(key, purpose + b"." + told, hashlib.sha256).hexdigest()


def set_cookie(request: Request, value: str, seconds: float) -> tuple[str, str]:
    """Return the header that gives the browser a session's cookie, or takes it away."""
    parts = [
        f"{COOKIE}={value}",
        f"Path={request.mount or '/'}",
        f"Max-Age={int(seconds)}",
        "HttpOnly",
        "SameSite=Strict",
    ]
    origin = str(request.environ.get("HTTP_ORIGIN", ""))
    if request.is_encrypted or origin.startswith("https://"):
        parts.append("Secure")
    return "Set-Cookie", "; ".join(parts)


class Throttle:
    """
    Bounds how often somebody may try to log in.  Thread-safe.

    An attempt counts when it begins, so many at once pass no bound; one that succeeds is given
    back.  The bound over all addresses is for a guesser who has many.  It can keep the right people
    out for as long as somebody guesses; a proxy in front can bound who may ask at all.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._overall = (0.0, 0)  # since when, how many
        self._mutex = threading.Lock()

    def begin(self, address: str) -> float:
        """Count an attempt.  Return 0, or the seconds after which one may try again."""
        key = _network(address)
        now = self._clock()
        with self._mutex:
            since, count = self._current(self._by_address.get(key), now)
            all_since, all_count = self._current(self._overall, now)
            if count >= PER_ADDRESS:
                return since + WINDOW - now
            if all_count >= OVERALL:
                return all_since + WINDOW - now
            self._overall = all_since, all_count + 1
            self._by_address[key] = since, count + 1
            self._by_address.move_to_end(key)
            while len(self._by_address) > ADDRESSES_MOST:
                self._by_address.popitem(last=False)
            return 0.0

    def succeeded(self, address: str) -> None:
        """Give back an attempt: the password was right."""
        with self._mutex:
            self._by_address.pop(_network(address), None)
            since, count = self._overall
            self._overall = since, max(0, count - 1)

    def __len__(self) -> int:
        return len(self._by_address)

    @staticmethod
    def _current(known: tuple[float, int] | None, now: float) -> tuple[float, int]:
        if known is None or now - known[0] >= WINDOW:
            return now, 0
        return known


def _network(address: str) -> str:
    """Return what attempts are counted by: an IPv4 address, or the network of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if parsed.version == 6:  # noqa: PLR2004
        mapped = parsed.ipv4_mapped
        if mapped is not None:
            return str(mapped)
        return str(ipaddress.ip_network((parsed, NETWORK_6), strict=False))
    return str(parsed)
