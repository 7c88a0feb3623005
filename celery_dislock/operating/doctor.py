"""Examine the locks of an app: their server, the workers, and the locks themselves.

The facts are gathered first.  Then the checks of :mod:`celery_dislock.operating.checks` judge them.
Nothing is changed but a key of doctor's own, which is gone again, and no command is sent that
blocks the server.  If the lock server is away, what the workers say is judged nevertheless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks, server, workers
from celery_dislock.operating.checks.facts import members_of
from celery_dislock.operating.checks.table import LEVELS, NOTE, SERIOUS, Finding, findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.operating.checks.facts import Facts


class Report(NamedTuple):
    """
    The result of an examination.

    Attributes:
        findings: All findings, the most serious first.
        away: Whether the lock server did not answer.
    """

    findings: Sequence[Finding]
    away: bool

    @property
    def serious(self) -> bool:
        """Whether a finding is serious."""
        return any(one.level == SERIOUS for one in self.findings)


def examine(facts: Facts) -> Report:
    """
    Examine everything.  Blocks for the round trips of all checks.

    Args:
        facts: What is known before the lock server is asked.
    """
    facts.members = members_of(facts.server)
    checks, found = [*workers.CHECKS, *server.CHECKS], []
    if not facts.away:
        try:
            facts.look(locks.is_suspect)
            checks += locks.CHECKS
        except StoreError as exc:
            found.append(Finding("locks", NOTE, f"The locks could not be looked at: {exc}"))
    for name, finds in checks:
        found += findings(name, finds, facts)
    return Report(sorted(found, key=lambda one: LEVELS.index(one.level)), facts.away)
