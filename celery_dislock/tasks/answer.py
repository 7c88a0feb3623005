"""What is told to who asks why a task does not run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Answer:
    """
    Why a task does not run, or that it does.

    Attributes:
        id: The task's id.
        state: What is so, in a word or two: "running", "in line", "not known".
        sentence: The answer, in one sentence.
        rests_on: What it rests on, in short lines; each says who has told it.
        remedy: What makes it run, or what to do; empty: nothing.
        task: The task's name; None: it is not known.
        key: The key of the lock that it is about; None: it is about none.
        away: Why the lock server did not tell all that it was asked; empty: it did.
        about: More of it, for programs.
    """

    id: str
    state: str
    sentence: str
    rests_on: tuple[str, ...] = ()
    remedy: str = ""
    task: str | None = None
    key: str | None = None
    away: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    #: Finds the answer.  Who looks at locks stands on a higher floor, and is put here by
    #: :mod:`celery_dislock.plugin`.
    find: ClassVar[Callable[..., Answer]]

    def __str__(self) -> str:
        return self.sentence
