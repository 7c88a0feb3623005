"""Who may log in to the page: passwords in a file, kept as scrypt has them.

Each line of a login file is ``name:scrypt:n:r:p:salt:hash``, with salt and hash in hexadecimal;
:func:`line_of` makes one, and ``celery dislock web --set-password`` writes it.  The file is read
again after a change, so a user who is taken out can do nothing from then on.

Source: RFC 7914, and the parameters that OWASP's Password Storage Cheat Sheet gives for scrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

N, R, P = 2**15, 8, 3  # cost, block size and passes of scrypt: 32 MB, about 0.2 s
MEMORY = 128 * 1024 * 1024  # bytes that scrypt may use, whatever a file asks for
PASSES_MOST = 16
SALT = 16  # bytes
NAME = re.compile(r"[A-Za-z0-9@._+-]{1,64}")
PASSWORD_LEAST = 8  # characters
PASSWORD_MOST = 1024  # bytes: a longer one is refused before any work

_LINE = re.compile(
    rf"(?P<name>{NAME.pattern}):scrypt:(?P<n>\d{{1,8}}):(?P<r>\d{{1,3}}):(?P<p>\d{{1,3}})"
    r":(?P<salt>[0-9a-f]{16,128}):(?P<hash>[0-9a-f]{64,128})"
)

logger = logging.getLogger("celery_dislock")


class _User(NamedTuple):
    n: int
    r: int
    p: int
    salt: bytes
    hash: bytes

    @property
    def memory(self) -> int:
        return 128 * self.r * (self.n + self.p + 2)

    def digest(self, password: bytes) -> bytes:
        return hashlib.scrypt(
            password,
            salt=self.salt,
            n=self.n,
            r=self.r,
            p=self.p,
            maxmem=MEMORY,
            dklen=len(self.hash),
        )


class LoginFile:
    """
    The users of the page, and their passwords.  Thread-safe.

    Args:
        path: The file.

    Raises:
        SettingsError: The file cannot be read, or a line of it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mutex = threading.Lock()
        self._one_at_a_time = threading.Lock()  # scrypt takes memory on purpose
        self._read: tuple[tuple[int, int, int], Mapping[str, _User]] | None = None
        self._nobody = _User(N, R, P, secrets.token_bytes(SALT), secrets.token_bytes(32))
        self._users()
        if os.name == "posix" and self._path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning(
                "The login file %s is open to other users of this machine: chmod 600 it.", path
            )

    def __call__(self, user: str, password: str) -> bool:
        """Tell whether this is the user's password.  Takes as long for a user there is not."""
        given = password.encode("utf-8", "surrogatepass")
        if len(given) > PASSWORD_MOST:
            return False
        known = self._users().get(user)
        of = known or self._nobody
        with self._one_at_a_time:
            is_right = hmac.compare_digest(of.digest(given), of.hash)
        return is_right and known is not None

    def stamp(self, user: str) -> bytes | None:
        """Return bytes that change with the user's password; None if there is no such user."""
        known = self._users().get(user)
        return known.hash if known is not None else None

    def _users(self) -> Mapping[str, _User]:
        with self._mutex:
            try:
                now = self._path.stat()
                state = now.st_mtime_ns, now.st_size, now.st_ino
                if self._read is None or self._read[0] != state:
                    self._read = state, users_in(self._path.read_text("utf-8"), str(self._path))
            except (OSError, ValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
                if isinstance(exc, SettingsError):
                    raise
                raise SettingsError("the page", "login", str(self._path), str(reason)) from exc
            return self._read[1]


def users_in(text: str, path: str) -> dict[str, _User]:
    """
    Read the lines of a login file.

    Raises:
        SettingsError: A line cannot be read.  The error has its number, and not the line.
    """
    users = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            remedy = (
                f"line {number} is not name:scrypt:n:r:p:salt:hash; "
                "let `celery dislock web --set-password` write it"
            )
            raise SettingsError("the page", "login", path, remedy)
        user = _User(
            int(found["n"]),
            int(found["r"]),
            int(found["p"]),
            bytes.fromhex(found["salt"]),
            bytes.fromhex(found["hash"]),
        )
        is_power = user.n > 1 and user.n & (user.n - 1) == 0
        if not is_power or not user.r or not 0 < user.p <= PASSES_MOST or user.memory > MEMORY:
            remedy = f"line {number} has parameters that scrypt refuses, or that take too long"
            raise SettingsError("the page", "login", path, remedy)
        users[found["name"]] = user
    return users


def line_of(name: str, password: str) -> str:
    """
    Return a line of a login file, with a new salt.

    Raises:
        SettingsError: The name or the password cannot be used.
    """
    if not NAME.fullmatch(name):
        remedy = "use up to 64 letters, digits and @ . _ + -"
        raise SettingsError("the page", "user", name, remedy)
    given = password.encode("utf-8", "surrogatepass")
    if len(password) < PASSWORD_LEAST or len(given) > PASSWORD_MOST:
        remedy = f"use {PASSWORD_LEAST} characters at least, and {PASSWORD_MOST} bytes at most"
        raise SettingsError("the page", "password", "...", remedy)
    user = _User(N, R, P, secrets.token_bytes(SALT), bytes(32))
    digest = user.digest(given).hex()
    return f"{name}:scrypt:{N}:{R}:{P}:{user.salt.hex()}:{digest}"


def set_password(path: str | os.PathLike[str], name: str, password: str) -> None:
    """
    Write a user's line to a login file, in place of the user's old one.

    The file is replaced as a whole, and is readable by its owner only.

    Raises:
        SettingsError: The name or the password cannot be used, or the file cannot be written.
    """
    line = line_of(name, password)
    file = Path(path)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        kept = [one for one in lines if one.partition(":")[0].strip() != name]
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write("\n".join([*kept, line, ""]))
        beside.replace(file)
    except OSError as exc:
        raise SettingsError("the page", "login", str(path), exc.strerror or str(exc)) from exc
