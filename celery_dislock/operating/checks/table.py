"""A table of checks.

A check is a generator of findings.  It judges the gathered facts, all of them or one Redis process
at a time.  The name in its decorator is that of its findings, and of its row in the documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.findings import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from celery_dislock.operating.checks.facts import Facts, Member
    from celery_dislock.operating.findings import Finding

    Finds = Callable[[Facts], Iterable[Finding]]
    FindsOfOne = Callable[[Member, Facts], Iterable[Finding]]


class Check(NamedTuple):
    """
    One row.

    Attributes:
        name: The check's name.
        finds: Returns what it finds.
    """

    name: str
    finds: Finds

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Return the findings; the last one tells if the lock server did not answer the check."""
        try:
            for one in self.finds(facts):
                yield one._replace(check=self.name)
        except StoreError as exc:
            yield note(f"This could not be looked at: {exc}")._replace(check=self.name)


class Table(list[Check]):
    """The checks of one subject, in the order of their findings."""

    def check(self, name: str) -> Callable[[Finds], Finds]:
        """Add a check of all facts."""

        def add(finds: Finds) -> Finds:
            self.append(Check(name, finds))
            return finds

        return add

    def check_each(self, name: str) -> Callable[[FindsOfOne], FindsOfOne]:
        """Add a check of each process of the lock server that answers."""

        def add(finds: FindsOfOne) -> FindsOfOne:
            def of_all(facts: Facts) -> Iterator[Finding]:
                for one in facts.answering:
                    for finding in finds(one, facts):
                        yield finding._replace(about=[one.name])

            self.append(Check(name, of_all))
            return finds

        return add
