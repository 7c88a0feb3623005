"""
Measure what docs/inside/benchmarks.md shows and write it, or run the benchmarks that are named.

    python -m benchmarks [--quick] [--url URL [--waiters N]] [--render] [name ...]

Without a name, all sections of the page are measured; a section can be named, too.  The other names
are benchmarks that print one table, in which our own targets are.  With --quick only those of them
that take seconds run, with a tenth of their rounds, and a ratio that is worse by more than a third
than the one in baseline.json is told as a warning.

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

from benchmarks import page
from benchmarks.acquire_release import bare_round_trips
from benchmarks.report import be_quick, fallen, print_table

if TYPE_CHECKING:
    from benchmarks.report import Row

NAMES = (
    "acquire_release",
    "kinds",
    "quorum",
    "many_leases",
    "metrics",
    "enqueue",
    "bursts",
    "guard",
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
    parser.add_argument("names", nargs="*", metavar="name", help="default: the page")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the rounds of the fast ones; warn of ratios that fell by a third",
    )
    parser.add_argument("--render", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--url", help="measure locks with a server of yours, and print the figures")
    parser.add_argument("--waiters", type=int, default=1000, help="with --url: at most")
    options = parser.parse_args()
    names = options.names or (QUICK if options.quick else () if options.render else page.SECTIONS)
    known = (*page.SECTIONS, *NAMES)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}")

    signal.signal(signal.SIGTERM, _exit)  # so that servers and workers are stopped then, too
    if options.url:
        page.print_locks(options.url, options.waiters)
        return
    rows: list[Row] = []
    if options.quick:
        be_quick()
    load = page.load_now()  # a section's own work would count in the load before the next
    with tempfile.TemporaryDirectory(prefix="dislock-bench-") as folder:
        speed = bare_round_trips(Path(folder, "speed"))
        for name in names:
            began = time.monotonic()
            print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
            if name in page.SECTIONS:
                page.measure(name, Path(folder, name), load)
            else:
                rows += import_module(f"benchmarks.{name}").run(Path(folder, name))
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.render or any(name in page.SECTIONS for name in names):
        page.write()
    if rows:
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
