"""An exception from a signal handler, at ten thousand random instants, leaves no lock behind."""

import json
import os
import random

import pytest

from tests.acceptance.fleet import ROOT
from tests.forked import run_python

pytestmark = pytest.mark.faults

MODES = ["acquire", "try", "with", "kept", "nested", "guard"]
STRIKES = 10_000 // len(MODES) + 1
WITHIN = 170  # seconds; some twenty on an idle machine


@pytest.mark.parametrize("strikes", [60, pytest.param(STRIKES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_it_leaves_nothing_behind(redis_url, mode, strikes):
    """The lock is free within its timeout, its thread can take it, and nothing is watched."""
    seed = random.randrange(2**32)
    words = (redis_url, mode, str(strikes), str(seed))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("tests.faults.interrupted", *words, folder=ROOT, env=env, timeout=WITHIN)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    seen = json.loads(done.stdout)
    assert seen["struck"] == strikes
    assert not {"WATCHED", "BARRED"} & seen.keys(), f"seed {seed}: {seen}"
    assert not [what for what in seen if what.startswith("raised")], f"seed {seed}: {seen}"
