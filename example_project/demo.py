"""
Show what celery-dislock does, on real workers: ``make demo``.

Starts a server and two workers of the shop, plays the scenes of ``scenes.py``, prints a
timeline and a verdict for each, draws a picture of each, and ends everything that it started.  The
exit status is 0 where all scenes passed, 1 where one failed, 2 where the demo could not be set up.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dislock.servers.memory import memory_server
from example_project import scenes, shop, timeline
from example_project.drawing import draw, legend, text_width
from example_project.stage import Outcome, Stage
from example_project.svg import picture
from example_project.workers import PROJECT, WorkerFailed, Workers
from tests.redis_server import RedisServer, ServerFailed, ServerMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType
    from typing import NoReturn

    from example_project.stage import Timeline

WORKERS = ("w1", "w2")
PROCESSES = 4  # of each worker: room for clicks to be refused while four exports run
ROW_PAUSE = 0.2  # seconds: an export of 31 rows or more lasts several watchdog timeouts
IN_README = (scenes.exports, scenes.killed_child)  # one picture shows these two
FAILED, NOT_SET_UP = 1, 2  # exit statuses
FOREIGN = ("CELERY_", "SHOP_")  # CELERY_BROKER_URL would lead the demo to a server not its own
INTERRUPTED = 128  # plus the signal's number: the exit status that a shell gives


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument(
        "--no-dislock",
        action="store_true",
        help="run the workers without locks, to see the scenes fail",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=PROJECT / "demo-output",
        help="folder for logs, books and exported files",
    )
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a scene at a time through a pipe, too
    try:
        return play(options.output.resolve(), locks=not options.no_dislock)
    except KeyboardInterrupt:
        print("\nInterrupted; everything that was started is stopped.", file=sys.stderr)
        return INTERRUPTED + signal.SIGINT
    except (ServerMissing, ServerFailed, WorkerFailed, TimeoutError) as exc:
        print(f"The demo cannot be set up: {exc}", file=sys.stderr)
        return NOT_SET_UP


def play(output: Path, *, locks: bool) -> int:
    """
    Play all scenes.

    Args:
        output: Folder for everything that is written; what an earlier demo left is removed.
        locks: Whether the workers run with ``--dislock`` or ``--no-dislock``.

    Returns:
        The exit status.
    """
    began = time.monotonic()
    events_file = output / "timeline.jsonl"
    _clear(output)
    timeline.record_to(events_file)
    outcomes: dict[scenes.Scene, Outcome] = {}
    with _serving(output / "redis") as (url, broker_url):
        settings = {
            "SHOP_BROKER_URL": broker_url,
            "SHOP_FOLDER": str(output / "shop"),
            "SHOP_ROW_PAUSE": str(ROW_PAUSE),
            "SHOP_TIMELINE": str(events_file),
        }
        shop.app.conf.update(shop.settings(settings))
        celery_options = ["--dislock" if locks else "--no-dislock", "-c", str(PROCESSES)]
        celery_options += ["--without-gossip", "--without-mingle"]
        print(_wrapped(f"How to read the timelines: {legend()}", ""))

        numbered = enumerate(scenes.SCENES, start=1)
        for timeout, group in itertools.groupby(numbered, key=lambda item: item[1][1]):
            settings["SHOP_WATCHDOG_TIMEOUT"] = str(timeout)
            with Workers(WORKERS, output, settings, celery_options) as workers:
                pids = ", ".join(f"{name} (pid {pid})" for name, pid in workers.pids.items())
                how = f"{PROCESSES} processes each, {celery_options[0]}, watchdog timeout"
                print(_wrapped(f"Workers {pids} run, {how} {timeout:g} s.", ""))
                stage = Stage(url, events_file, timeout, len(WORKERS) * PROCESSES)
                for number, (scene, _) in group:
                    outcomes[scene] = _show(number, scene, stage)

    passed = sum(not outcome.problems for outcome in outcomes.values())
    print(f"\n{passed} of {len(outcomes)} scenes passed, in {time.monotonic() - began:.0f} s.")
    write_pictures(output, outcomes)
    print(f"The timelines as pictures: {output / 'pictures'}, {output / 'demo.svg'}")
    if passed == len(outcomes):
        return 0
    logs = ", ".join(str(output / f"{name}.log") for name in WORKERS)
    print(f"The workers' logs: {logs}\nThe timeline: {events_file}")
    return FAILED


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve locks and messages; yields the URL as redis-py spells it, and as Celery does."""
    with contextlib.ExitStack() as running:
        try:
            server = running.enter_context(RedisServer(folder, unix_socket=True))
        except ServerMissing as exc:
            print(_wrapped(f"Served by this process, in Python, which is slower: {exc}.", ""))
            url = memory_server().url
            yield url, url
        else:
            print(_wrapped(f"{server.program} runs (pid {server.pid}), on its own socket.", ""))
            yield server.url, server.broker_url


def write_pictures(output: Path, outcomes: Mapping[scenes.Scene, Outcome]) -> None:
    """Draw the timelines of each scene, and those of ``IN_README`` once more in one picture."""
    together: list[Timeline] = []
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    for scene, outcome in outcomes.items():
        file = output / "pictures" / f"{scene.__name__}.svg"
        file.write_text(picture(outcome.timelines), "utf-8")
        if scene in IN_README:
            together += outcome.timelines
    (output / "demo.svg").write_text(picture(together), "utf-8")


def _show(number: int, scene: scenes.Scene, stage: Stage) -> Outcome:
    print("\n" + _wrapped(f"Scene {number}. {(scene.__doc__ or '').strip()}", ""), end="\n\n")
    try:
        outcome = scene(stage)
    except TimeoutError as exc:
        outcome = Outcome("the scene did not come to its end", [str(exc)])
    except BaseException as exc:
        # Its frames have the results that it waits for.  These unsubscribe when they go, and would
        # look for the server for 20 s if that went first.
        traceback.clear_frames(exc.__traceback__)
        raise
    for drawn in outcome.timelines:
        print(f"  ({drawn.title})")
        print("\n".join(draw(drawn.spans, drawn.refused, drawn.others)), end="\n\n")
    for note in outcome.notes:
        print(_wrapped(note, "  "))
    verdict = "FAIL" if outcome.problems else "PASS"
    print(_wrapped(f"{verdict}  {outcome.verdict}.", "", "      "))
    for problem in outcome.problems:
        print(_wrapped(f"- {problem}", "      ", "        "))
    return outcome


def _wrapped(text: str, first: str, following: str | None = None) -> str:
    return textwrap.fill(
        text,
        text_width(),
        initial_indent=first,
        subsequent_indent=first if following is None else following,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _clear(output: Path) -> None:
    for folder in ("redis", "shop", "pictures"):
        shutil.rmtree(output / folder, ignore_errors=True)
    for name in ("timeline.jsonl", "demo.svg", *(f"{name}.log" for name in WORKERS)):
        with contextlib.suppress(FileNotFoundError):
            (output / name).unlink()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(INTERRUPTED + number)


if __name__ == "__main__":
    sys.exit(main())
