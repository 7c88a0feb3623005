"""How the models of the scripts are run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.stateful import RuleBasedStateMachine

FINDING = (Phase.explicit, Phase.generate)
# To make a failure small takes minutes of a hundred thousand commands each, and nobody waits for
# that in CI: there the line that reproduces it is printed at once, to be added and run at home.
PHASES = FINDING if os.environ.get("CI") else (*FINDING, Phase.shrink)


def run_model(machine: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Run so many examples, of so many steps at most, and fail with the steps to the failure."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            phases=PHASES,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def break_rule(
    rule: tuple[str, str], run: Callable[[int, Callable[[str], str]], object], seeds: int = 60
) -> None:
    """
    Check that some history fails without a rule of the scripts: what checks them can.

    Args:
        rule: The text of the rule, and what takes its place.
        run: Runs the history of a seed, with what changes the text of the scripts.
        seeds: How many histories there are.
    """
    was, becomes = rule
    seen = []

    def changed(text: str) -> str:
        seen.append(was in text)
        return text.replace(was, becomes)

    for seed in range(seeds):
        try:
            run(seed, changed)
        except (AssertionError, ValueError):
            assert any(seen), "the rule is not there"
            return
    pytest.fail("no history shows it")
