"""Turn a task's ``lock_key`` and the arguments of one call into the key of a lock.

A key is made from the *text* of the arguments.  ``7`` and ``"7"``, or a UUID and its ``str``, give
the same key on purpose, because message serializers change such types.  Values with different
texts never give the same key of a template.  This is guaranteed by construction:

- Each literal between two placeholders has a *marker*: its first character that is neither
  alphanumeric nor ``%``.  The part of the literal before the marker does not contain the marker.
- In values, every marker of the template is percent-encoded, and so are ``: % { } < >`` and
  control characters.  The encoded text consists of ``%``, digits and A-F, none of which can be a
  marker.  The encoding is reversible, since ``%`` itself is always encoded.
- Therefore the first marker after the start of a value belongs to the literal that follows the
  value.  It determines where the value ends and the next one begins, so a key can be parsed in
  only one way.

A key of more than 200 bytes is shortened: a readable head, ``%#`` and a digest of the whole key.
Encoding never produces ``%#``, and a template whose literals could produce it is refused.  A short
key of a template therefore never equals a shortened one.  A callable returns whole keys, and must
itself return different keys for different locks.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any
from uuid import UUID

from celery_dislock.exceptions import LockKeyError
from celery_dislock.keys.signatures import keywords_name

MAX_KEY_BYTES = 200  # bytes of UTF-8
DIGEST_CHARS = 32  # hex digits of a SHA-256 digest: 128 bits
DIGEST_MARK = "%#"
WRITTEN = 1000  # keys, written by people, that are remembered as checked
_HEAD_BYTES = MAX_KEY_BYTES - len(DIGEST_MARK) - DIGEST_CHARS

# C0, DEL, C1, the line and paragraph separators, and surrogates, which UTF-8 cannot encode.
CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
ENCODED = r":%{}<>" + CONTROL
FORBIDDEN = re.compile(rf"[{{}}{CONTROL}]")  # braces delimit the hash tag of the Redis name
ALLOWED = "str, int, bool, UUID, Enum, date, datetime or Decimal"

# Placeholders of other kinds of templates: `%(name)s`, `%s`; `$name` if there is such an argument.
PRINTF = re.compile(r"%\(\w+\)[a-z]?|%[sdr](?!\w)")
DOLLAR = re.compile(r"\$([A-Za-z_]\w*)")
PLACEHOLDER = re.compile(r"<([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)>")  # in a key: nobody filled it in

Bind = Callable[..., dict[str, Any]]  # returns the arguments of a call by name

_TOKEN = re.compile(r"<<|>>|<([^<>]*)>|[<>]")
_NOT_GIVEN = inspect.Parameter.empty


class InvalidTemplate(ValueError):  # noqa: N818  # always turned into a SettingsError
    """A ``lock_key`` cannot be used as declared; the message says what to write instead."""


class KeyBuilder:
    """
    Builds the keys of each call from its arguments, as a ``lock_key`` declares them.

    Attributes:
        reads: Names of the arguments that it reads; None: all.
        paths: The placeholders of a template, without brackets.
        pattern: Matches all keys that are not shortened; None: that is not known.
    """

    reads: frozenset[str] | None = None
    paths: Sequence[str] = ()
    pattern: re.Pattern[str] | None = None

    def keys(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[str]:
        """
        Return the keys of a call with these arguments, without ``self``.  Never blocks.

        Raises:
            LockKeyError: These arguments give no key.  No lock was taken.
            TypeError: The arguments do not fit the task's signature.  No lock was taken.
        """
        return [self.key(args, kwargs)]

    def key(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the only key; a callable's may be several."""
        raise NotImplementedError


def key_of(lock: str) -> str:
    """
    Return the key of a lock, given the lock's name in Redis.

    Of several keys that are reserved together, the name tells the first.
    """
    key, _, several = lock.partition("{")[2].rpartition("}")
    return f"{key} and others" if several else key


def in_order(keys: Sequence[str]) -> Sequence[str]:
    """Return a lock's keys in the order in which every caller takes them, without duplicates."""
    if not keys:
        raise LockKeyError("[]", None, "a lock has one key at least")
    return keys if len(keys) == 1 else sorted(set(keys))


class KeyTemplate(KeyBuilder):
    """A key with placeholders, such as ``export:<corp_id>`` or ``<order.customer.id>``.

    ``<corp_id>`` is the argument of that name, given by position, by keyword or by default.  Each
    name after a dot is looked up in the value: as a key if the value is a mapping, otherwise as an
    attribute.  Attributes are never called.  If the signature has ``**kwargs``, a name that is no
    parameter is looked up in them.  ``<<`` and ``>>`` stand for ``<`` and ``>``.
    """

    def __init__(self, template: str, signature: inspect.Signature, bind: Bind) -> None:
        literals, paths = _parse(template, signature)
        names = [_split(path, signature) for path in paths]
        markers = _markers(literals, paths)
        self._template = template
        self.paths: Sequence[str] = paths
        self._bind = bind
        self._extra = keywords_name(signature)
        self._head = literals[0]
        self.pattern: re.Pattern[str] | None = re.compile(".*".join(map(re.escape, literals)))
        self._slots = [
            (path, name, walk, literal)
            for path, (name, *walk), literal in zip(paths, names, literals[1:], strict=True)
        ]
        encoded = re.compile(f"[{ENCODED}{re.escape(markers)}]")
        self._needs_encoding, self._encode = encoded.search, encoded.sub
        read = frozenset(name for name, *_ in names)
        self.reads = None if self._extra in read else read  # None: all that **kwargs has, at least

    def key(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the key of a call; see `KeyBuilder.keys`."""
        values = self._bind(*args, **kwargs)
        if self._extra:
            values = {**values[self._extra], **values}
        parts = [self._head]
        for path, name, walk, literal in self._slots:
            value = values.get(name, _NOT_GIVEN)
            if walk:
                value = self._walked(value, path, walk)
            try:
                text = text_of(value)
            except ValueError as error:  # an int of more digits than Python converts to text
                raise LockKeyError(self._template, path, str(error)) from error
            if text is None:
                raise self._refused(value, path)
            if self._needs_encoding(text):
                text = self._encode(percent_encoded, text)
            parts += (text, literal)
        return check_key("".join(parts), declared=self._template)

    def value(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return the value of the only placeholder."""
        values = self._bind(*args, **kwargs)
        if self._extra:
            values = {**values[self._extra], **values}
        ((path, name, walk, _),) = self._slots
        return self._walked(values.get(name, _NOT_GIVEN), path, walk)

    def _walked(self, value: object, path: str, walk: Sequence[str]) -> object:
        for name in walk if value is not _NOT_GIVEN else ():
            owner = value
            if isinstance(owner, Mapping):
                value = owner.get(name, _NOT_GIVEN)  # not []: a defaultdict would create an entry
            else:
                value = getattr(owner, name, _NOT_GIVEN)
            if value is _NOT_GIVEN:
                raise LockKeyError(self._template, path, f"{kind_of(owner)} has no {name!r}")
        return value

    def _refused(self, value: object, path: str) -> LockKeyError:
        reason = f"{kind_of(value)} is not allowed in a key; use {ALLOWED}"
        if value is _NOT_GIVEN:
            reason = "the call does not give it"
        return LockKeyError(self._template, path, reason)


class DigestKey(KeyBuilder):
    """A key of the task's name and a digest of all its arguments, defaults applied.

    Unlike in a template, ``1``, ``"1"``, ``1.0``, ``True`` and None give different keys, because
    serializers keep them distinct.  A list and a tuple give the same key.  So do a UUID, Decimal,
    date or datetime and its text, and an Enum and its value, because serializers convert them.
    """

    def __init__(self, task_name: str, bind: Bind) -> None:
        self._name = re.sub(f"[{ENCODED}]", percent_encoded, task_name)
        self._declared = f"{task_name}:<all arguments>"
        self._bind = bind

    def key(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the key of a call; see `KeyBuilder.keys`."""
        digest = hashlib.sha256()
        for name, value in self._bind(*args, **kwargs).items():
            try:
                digest.update(canonical(name) + canonical(value))
            except (NotPlainError, RecursionError) as error:
                what = "data nested this deep" if isinstance(error, RecursionError) else error
                reason = f"{what} cannot be digested; declare an explicit lock_key"
                raise LockKeyError(self._declared, name, reason) from error
        key = f"{self._name}:{digest.hexdigest()[:DIGEST_CHARS]}"
        return check_key(key, declared=self._declared)


def _parse(template: str, signature: inspect.Signature) -> tuple[list[str], list[str]]:
    """Split a template into literals and placeholders; there is one literal more than these."""
    if not template:
        raise InvalidTemplate("the template is empty; name the lock, as in 'export:<corp_id>'")
    literals, paths, end = [""], [], 0
    for token in _TOKEN.finditer(template):
        literals[-1] += template[end : token.start()]
        end = token.end()
        if token[0] in ("<", ">"):
            what = f"{'unclosed' if token[0] == '<' else 'stray'} {token[0]!r}"
            raise InvalidTemplate(f"{what} at position {token.start()}; double it to mean itself")
        if token[1] is None:
            literals[-1] += token[0][0]
        else:
            paths.append(token[1])
            literals.append("")
    literals[-1] += template[end:]
    whole = "".join(literals)
    dollar = DOLLAR.search(whole)
    other = PRINTF.search(whole) or (
        dollar if dollar and dollar[1] in signature.parameters else None
    )
    if other:
        raise InvalidTemplate(f"{other[0]!r} stands for itself; write <name> for an argument")
    if wrong := FORBIDDEN.search(whole):
        hint = "; write <name> for an argument" if wrong[0] in "{}" else ""
        raise InvalidTemplate(f"{wrong[0]!r} cannot stand in a key{hint}")
    # The value after a literal may be empty or begin with "#".
    if any(DIGEST_MARK in part + "#" for part in literals[:-1]) or DIGEST_MARK in literals[-1]:
        raise InvalidTemplate("'%' cannot stand before '#' or <name>: '%#' marks a shortened key")
    return literals, paths


def _markers(literals: list[str], paths: list[str]) -> str:
    markers = ""
    for (left, right), literal in zip(pairwise(paths), literals[1:-1], strict=True):
        found = next((char for char in literal if char != "%" and not char.isalnum()), None)
        if found is None:
            raise InvalidTemplate(f"separate <{left}> and <{right}> with ':'")
        markers += found
    return markers


def _split(path: str, signature: inspect.Signature) -> list[str]:
    name, *walk = path.split(".")
    if not path:
        raise InvalidTemplate("'<>' is empty; write <name> for an argument, '<<>>' for brackets")
    if not all(part.isidentifier() for part in (name, *walk)):
        raise InvalidTemplate(f"<{path}> is not a name, nor names joined by dots")
    if private := [part for part in walk if part.startswith("_")]:
        raise InvalidTemplate(f"<{path}>: {private[0]!r} is private; name public attributes only")
    names = list(signature.parameters)
    if name not in names and not keywords_name(signature):
        having = f"its arguments are {', '.join(names)}" if names else "it takes none"
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean <{'.'.join((*near, *walk))}>?" if near else ""
        raise InvalidTemplate(f"<{name}> is no argument of the task; {having}{hint}")
    return [name, *walk]


class NotPlainError(Exception):
    """A value has no canonical form; the message is the value's type."""


def check_key(key: str, *, declared: str | None = None) -> str:
    """
    Check a whole key, and shorten it if it is longer than ``MAX_KEY_BYTES``.

    A key that this function returned is returned unchanged.

    Args:
        key: The whole key.
        declared: The source of the key, as an error names it; None: the key itself.

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


def keys_of(key: object) -> tuple[str, ...]:
    """
    Return the keys of a lock for one key or a list of keys, as people write them, in order.

    Raises:
        LockKeyError: A key cannot be used, or the list is empty.
    """
    several = isinstance(key, Iterable) and not isinstance(key, (str, bytes))
    given: Any = key if several else [key]
    return tuple(in_order([check_written(key) for key in given]))


@lru_cache(WRITTEN)
def check_written(key: str) -> str:
    """
    Check a whole key, as people write it, and shorten it; see :func:`check_key`.

    Raises:
        LockKeyError: See :func:`check_key`; or the key is the template of a task.
    """
    checked = check_key(key)
    if found := PLACEHOLDER.search(key) or PRINTF.search(key):
        why = f"{found[0]!r} stands for no value in a key: write the value, as in 'export:7'"
        raise _refused(key, None, why)
    return checked


def _refused(key: object, declared: str | None, reason: str) -> LockKeyError:
    if declared is None:
        declared = key[:MAX_KEY_BYTES] if isinstance(key, str) else reprlib.repr(key)
    return LockKeyError(declared, None, reason)


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
