"""Run ``python -m celery_dislock.testing``: a server for trying, as users start it."""

import re
import subprocess
import sys
from contextlib import contextmanager

SERVE = (sys.executable, "-m", "celery_dislock.testing")


@contextmanager
def serving(port=0):
    """Run the server at a port; yields its process, and the URL that it prints first."""
    process = subprocess.Popen([*SERVE, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        yield process, re.findall(r"redis://\S+", first)[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
