"""An exception from a signal handler, at ten thousand random instants, leaves no lock behind."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
MODES = ["acquire", "try", "with", "kept", "nested", "guard"]
STRIKES = 10_000 // len(MODES) + 1
WITHIN = 170  # seconds; some twenty on an idle machine


@pytest.mark.parametrize("mode", MODES)
def test_it_leaves_nothing_behind(redis_url, mode):
    """The lock is free within its timeout, its thread can take it, and nothing is watched."""
    seed = random.randrange(2**32)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.faults.interrupted",
            redis_url,
            mode,
            str(STRIKES),
            str(seed),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    seen = json.loads(done.stdout)
    assert seen["struck"] == STRIKES
    assert not {"WATCHED", "BARRED"} & seen.keys(), f"seed {seed}: {seen}"
    assert not [what for what in seen if what.startswith("raised")], f"seed {seed}: {seen}"
