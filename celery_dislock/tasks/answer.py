"""The answer to the question why a task does not run."""

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
        state: The task's state in a word or two: "running", "in line", "not known".
        sentence: The answer, in one sentence.
        rests_on: The facts on which the answer rests, in short lines; each names its source.
        remedy: What makes the task run, or what to do; empty: nothing.
        task: The task's name; None: it is not known.
        key: The key of the lock that the answer is about; None: it is about none.
        away: Why the lock server did not answer all questions; empty: it did.
        about: More facts, for programs.
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

    #: Finds the answer.  The function is one of :mod:`celery_dislock.operating`, which this floor
    #: may not import, so :mod:`celery_dislock.plugin` puts it here.
    find: ClassVar[Callable[..., Answer]]

    def __str__(self) -> str:
        return self.sentence
