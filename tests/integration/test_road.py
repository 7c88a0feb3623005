"""How much of the package each journey passes, from a task to its socket."""

import re
import sys

import pytest

from tests.programs import run

ROW = re.compile(r"^(.+?) +(\d+) +(\d+) +(\d+) +(\d+) +\d+$", re.MULTILINE)


@pytest.mark.usefixtures("redis_program")
def test_no_journey_is_longer_than_its_goal():
    """A change that makes one longer must be seen; `make road ARGS=-v` names the modules."""
    found = ROW.findall(run(sys.executable, "-m", "benchmarks.road").stdout)
    assert len(found) == 6
    for journey, modules, modules_most, functions, functions_most in found:
        assert int(modules) <= int(modules_most), journey
        assert int(functions) <= int(functions_most), journey
