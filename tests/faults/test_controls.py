"""Each control breaks what it says: the text that it changes is there."""

from tests.programs import run_code

# In a process for all, as what a control breaks stays broken; each in a fork of it.
BREAK_EACH = """
import os, sys
from proof.controls import CONTROLS

stale = []
for name, control in CONTROLS.items():
    child = os.fork()
    if not child:
        try:
            control.breaks()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        stale.append(name)
sys.exit(f"these break nothing any more: {stale}" if stale else 0)
"""


def test_each_control_finds_what_it_breaks():
    """A control whose text was changed since would stop a run of the proof before it begins."""
    run_code(BREAK_EACH)
