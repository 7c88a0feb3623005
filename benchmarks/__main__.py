"""
Run the benchmarks, all of them or those that are named, and print one table.

    python -m benchmarks [--quick] [name ...]

With --quick only those that take seconds run, with a tenth of their rounds.  A ratio that is worse
by more than a third than the one in baseline.json is told as a warning.

A figure that is missed is printed as missed; the exit code is 0 all the same, because a time that
was measured on a shared machine proves nothing about the code.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.acquire_release import bare_round_trips
from benchmarks.report import be_quick, fallen, print_table

if TYPE_CHECKING:
    from benchmarks.report import Row

NAMES = (
    "acquire_release",
    "kinds",
    "quorum",
    "hand_off",
    "many_leases",
    "noop_task",
    "metrics",
    "enqueue",
    "enqueue_under_kills",
    "bursts",
    "guard",
    "never_yields",
    "crash_to_next",
    "hot_key",
    "parking",
    "sweep",
    "listing",
)
QUICK = ("acquire_release", "kinds", "guard")
BASELINE = Path(__file__).with_name("baseline.json")  # ratios, by what was measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=summaries())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # No choices=: argparse would refuse an empty list of them.
    parser.add_argument("names", nargs="*", metavar="name", help="default: all")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the rounds of the fast ones; warn of ratios that fell by a third",
    )
    options = parser.parse_args()
    names = options.names or (QUICK if options.quick else NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")

    signal.signal(signal.SIGTERM, _exit)  # so that servers and workers are stopped then, too
    rows: list[Row] = []
    if options.quick:
        be_quick()
    with tempfile.TemporaryDirectory(prefix="dislock-bench-") as folder:
        speed = bare_round_trips(Path(folder, "speed"))
        for name in names:
            began = time.monotonic()
            print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
            rows += import_module(f"benchmarks.{name}").run(Path(folder, name))
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    print_table(rows, speed)
    if options.quick:
        for fall in fallen(rows, json.loads(BASELINE.read_text("utf-8"))):
            print(f"WARNING: {fall}", file=sys.stderr)


def summaries() -> str:
    """Return the first line of each benchmark's docstring, under its name."""
    docs = {name: import_module(f"benchmarks.{name}").__doc__ or "" for name in NAMES}
    return "\n".join(f"{name:<19} {doc.strip().splitlines()[0]}" for name, doc in docs.items())


def _exit(signum: int, _frame: Any) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
