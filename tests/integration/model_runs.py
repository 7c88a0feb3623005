"""How the models of the scripts are shown to find what is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


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
