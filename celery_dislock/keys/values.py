"""Convert argument values to the text in a key, and check finished keys."""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date
from decimal import Decimal
from enum import Enum
from uuid import UUID

from celery_dislock.exceptions import LockKeyError

MAX_KEY_BYTES = 200  # bytes of UTF-8
DIGEST_CHARS = 32  # hex digits of a SHA-256 digest: 128 bits
DIGEST_MARK = "%#"
_HEAD_BYTES = MAX_KEY_BYTES - len(DIGEST_MARK) - DIGEST_CHARS

# C0, DEL, C1, the line and paragraph separators, and surrogates, which UTF-8 cannot encode.
CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
ENCODED = r":%{}<>" + CONTROL
FORBIDDEN = re.compile(rf"[{{}}{CONTROL}]")  # braces delimit the hash tag of the Redis name
ALLOWED = "str, int, bool, UUID, Enum, date, datetime or Decimal"


class NotPlainError(Exception):
    """A value has no canonical form; the message is the value's type."""


def check_key(key: str, *, declared: str | None = None) -> str:
    """
    Check a whole key, and shorten it if it is longer than ``MAX_KEY_BYTES``.

    A key that this function returned is returned unchanged.

    Args:
        key: The whole key.
        declared: What an error names as the source of the key; None: the key itself.

    Raises:
        LockKeyError: The key is not a str, is empty, or contains braces or control characters.
    """
    if not isinstance(key, str):
        raise _refused(key, declared, f"a key is a str, not {kind_of(key)}")
    if not key:
        raise _refused(key, declared, "the key is empty")
    if wrong := FORBIDDEN.search(key):
        raise _refused(key, declared, f"the key holds {wrong[0]!r}, which no key may")
    raw = key.encode()
    if len(raw) <= MAX_KEY_BYTES:
        return str.__str__(key)
    head = raw[:_HEAD_BYTES].decode(errors="ignore")  # drops a character that was cut in two
    return f"{head}{DIGEST_MARK}{hashlib.sha256(raw).hexdigest()[:DIGEST_CHARS]}"


def _refused(key: object, declared: str | None, reason: str) -> LockKeyError:
    return LockKeyError(reprlib.repr(key) if declared is None else declared, None, reason)


def percent_encoded(match: re.Match[str]) -> str:
    """Return the percent-encoded characters of the match; a replacement for ``re.sub``."""
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def text_of(value: object) -> str | None:
    """Return the text of a value, or None if its type is not allowed in a key."""
    if isinstance(value, Enum):
        return text_of(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, (bool, UUID, Decimal)) else None


def kind_of(value: object) -> str:
    """Return the name of a value's type, for a message."""
    if isinstance(value, Enum):
        return f"{type(value).__name__} of {kind_of(value.value)}"
    return "None" if value is None else type(value).__name__


def canonical(value: object) -> bytes:
    """Return bytes that are equal for equal data only; each value is prefixed with its length."""
    parts: Iterable[bytes]
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool):
        tag, parts = b"c", [str(value).encode()]
    elif isinstance(value, int):
        tag, parts = b"i", [f"{int(value):x}".encode()]  # hex has no digit limit
    elif isinstance(value, float):
        tag, parts = b"f", [float.__repr__(value).encode()]
    elif (text := text_of(value)) is not None:
        tag, parts = b"s", [text.encode("utf-8", "surrogatepass")]
    elif isinstance(value, bytes):
        tag, parts = b"b", [value]
    elif isinstance(value, (list, tuple)):
        tag, parts = b"l", map(canonical, value)
    elif isinstance(value, Mapping):
        tag = b"m"
        parts = sorted(canonical(key) + canonical(item) for key, item in value.items())
    elif isinstance(value, AbstractSet):
        tag, parts = b"e", sorted(map(canonical, value))
    else:
        raise NotPlainError(kind_of(value))
    data = b"".join(parts)
    return b"%b%d:%b" % (tag, len(data), data)
