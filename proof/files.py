"""A file with a set of elements, which each writer reads, and writes with one element more.

It is the resource that a lock protects: two writers at a time lose an element.  A *fenced* file
remembers the largest fencing token that it has seen, and refuses a smaller one.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Outdated(Exception):  # noqa: N818 -- reads as what is the case
    """The file has seen a larger token."""


class SharedFile:
    """
    The file; its one step is atomic, as that of a storage service is.

    Args:
        path: Where it is.
        fenced: Whether it looks at the tokens.
    """

    def __init__(self, path: Path, *, fenced: bool) -> None:
        self._path = path
        self._fenced = fenced

    def read(self, token: int = 0) -> list[str]:
        """
        Return the elements.

        Raises:
            Outdated: It is fenced, and has seen a larger token.
        """
        with self._content(token) as content:
            return list(content["elements"])

    def write(self, elements: list[str], token: int = 0) -> None:
        """
        Replace the elements.

        Raises:
            Outdated: It is fenced, and has seen a larger token.  Nothing is changed.
        """
        with self._content(token) as content:
            content["elements"] = elements

    @contextmanager
    def _content(self, token: int) -> Iterator[dict[str, Any]]:
        with self._path.with_suffix(".mutex").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            text = self._path.read_text() if self._path.exists() else ""
            content: dict[str, Any] = json.loads(text or '{"elements": [], "token": 0}')
            if self._fenced:
                if token < content["token"]:
                    raise Outdated(str(token))
                content["token"] = token
            yield content
            # A kill in the middle must not tear the file: a name changes hands at once.
            written = self._path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(content))
            written.replace(self._path)
