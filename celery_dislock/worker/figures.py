"""Answer ``celery inspect dislock``: what only the processes of a worker know of their locks.

The command is answered by the worker's main process.  Under prefork the locks are held in the pool
processes.  Each of them keeps its figures in a file, in a folder that the main process has made
before it forked.  Neither the broker nor the lock server is needed for that: either may be what is
away when somebody asks.

The watchdog's thread writes a file as a whole, under another name first, so that a reader never
finds half of it.  Only files of processes that are in the pool now are read.  Those of dead
processes are deleted.

A worker that is killed leaves its folder.  A main process keeps its folder locked for as long as it
lives, so the next worker of the same user can tell such folders, and deletes them.  Process ids
could not tell: two containers may share the folder of temporary files.  The lock also keeps
systemd-tmpfiles from deleting the folder of a worker that has done nothing for days.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery import bootsteps, current_app

from celery_dislock.exceptions import DislockError
from celery_dislock.locks.figures import read
from celery_dislock.locks.running import is_pool_process
from celery_dislock.operating.about import about
from celery_dislock.operating.checks.workers import LATE
from celery_dislock.operating.findings import number
from celery_dislock.parking.process import runtime_of
from celery_dislock.tasks.request import is_alive
from celery_dislock.words import for_people

try:
    import fcntl
except ImportError:  # pragma: no cover -- Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from celery import Celery
    from celery.worker import WorkController

FOLDER = "CELERY_DISLOCK_FIGURES"  # environment variable: the folder, for pool processes
NAMED = "celery-dislock-"  # how the name of a folder begins
MARK = "figures"  # a file that says that the folder is one of these
YOUNG = 60.0  # seconds for which a folder may not have its lock yet
FULL = "full"  # the argument of `celery inspect dislock` that asks for all figures
SHORT = 3  # leases of a process that are told without it
BIGGEST = 1_000_000  # bytes of a file that is read

logger = logging.getLogger("celery_dislock")

_folders: WeakKeyDictionary[Celery, Folder] = WeakKeyDictionary()


class Folder:
    """
    The folder in which the pool processes of one worker leave their figures.

    Raises:
        OSError: It cannot be made.

    Attributes:
        path: The folder, which only this user can read.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=NAMED))
        (self.path / MARK).touch()
        # A number, not a file object: a pool process may have closed it, and use it for another.
        self._locked = _lock(self.path)

    def read(self, pids: Iterable[int], now: float) -> dict[int, dict[str, Any]]:
        """
        Return the figures of these processes, by process id, and delete those of all others.

        Args:
            pids: The processes that are in the pool.
            now: Monotonic time.
        """
        known = set(pids)
        found: dict[int, dict[str, Any]] = {}
        for file in self.path.glob("[0-9]*.json"):
            if file.stem.isdigit() and int(file.stem) in known:
                # It may be gone, or damaged: then its process is one that has not told.
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                    found[int(file.stem)] = _read(file, now)
            elif not is_alive(int(file.stem.partition(".")[0])):
                with contextlib.suppress(OSError):
                    file.unlink()
        return found

    def remove(self) -> None:
        """Delete the folder, unless this is another process than made it."""
        if self._pid == os.getpid():
            _delete(self.path)
            if self._locked is not None:
                os.close(self._locked)
                self._locked = None


def _delete(path: Path) -> None:
    """Delete a folder of figures, and nothing in it that is something else."""
    with contextlib.suppress(OSError):
        for file in (*path.glob("[0-9]*.json"), path / MARK):
            file.unlink(missing_ok=True)
        path.rmdir()


def _read(file: Path, now: float) -> dict[str, Any]:
    with file.open("rb") as opened:
        figures = dict(json.loads(opened.read(BIGGEST)))
    unchanged_for = round(now - figures.pop("at"), 3)
    return {**read(figures, now), "unchanged_for": unchanged_for}


def _lock(path: Path) -> int | None:
    """
    Lock a folder until this process ends.

    Returns:
        What to close to unlock it; None if another process has it locked, or if it cannot be done.
    """
    if fcntl is None:  # pragma: no cover -- Windows
        return None
    opened = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


def remove_left_behind() -> None:
    """Delete the folders that killed workers of this user have left."""
    if fcntl is None:  # pragma: no cover -- Windows
        return
    for path in Path(tempfile.gettempdir()).glob(f"{NAMED}*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            if not ours or time.time() - about.st_mtime < YOUNG or not (path / MARK).exists():
                continue
            locked = _lock(path)
            if locked is not None:
                _delete(path)
                os.close(locked)


class FigureFile:
    """
    The file of one pool process.

    Args:
        folder: The folder.
        clock: Returns monotonic seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = folder / f"{os.getpid()}.json"
        self._new = folder / f"{os.getpid()}.new.json"
        self._clock = clock

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the figures.  Does nothing if the worker has removed the folder."""
        with contextlib.suppress(OSError):  # a full disk must not disturb the watchdog
            self._new.write_text(json.dumps({**figures, "at": self._clock()}))
            self._new.replace(self._file)

    def remove(self) -> None:
        """Delete the file."""
        with contextlib.suppress(OSError):
            self._file.unlink()


class FiguresStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Bootstep of a prefork worker that locks: makes the folder before the pool is forked."""

    label = "Dislock figures"

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._folder: Folder | None = None
        os.environ.pop(FOLDER, None)  # of the worker whose task has started this one

    def include_if(self, worker: WorkController) -> bool:
        """Tell whether this worker has pool processes, and its tasks lock or may lock."""
        runtime = runtime_of(worker.app)
        guarded = any(hasattr(task, "dislock_guard") for task in worker.app.tasks.values())
        uses_locks = guarded or runtime.enabled or runtime.for_python
        return bool(uses_locks) and not runtime.off and _has_processes(worker)

    def create(self, worker: WorkController) -> FiguresStep:
        """Make the folder; without it, the figures of pool processes are missing."""
        try:
            remove_left_behind()
            self._folder = _folders[worker.app] = Folder()
            os.environ[FOLDER] = str(self._folder.path)  # a spawned pool process gets it, too
        except OSError as exc:
            logger.info("celery inspect dislock will not tell of pool processes: %s", exc)
        return self

    def start(self, _worker: WorkController) -> None:
        """Do nothing: the pool processes write."""

    def stop(self, worker: WorkController) -> None:
        """Remove the folder."""
        folder, self._folder = self._folder, None
        if folder is not None:
            _folders.pop(worker.app, None)
            os.environ.pop(FOLDER, None)
            folder.remove()


def _has_processes(worker: WorkController) -> bool:
    return bool(getattr(worker.pool_cls, "uses_semaphore", False))  # prefork alone does


def show_figures(**_kwargs: Any) -> None:
    """Show the figures of this pool process from now on; handles ``worker_process_init``."""
    folder = os.environ.get(FOLDER)
    if folder and is_pool_process():
        with contextlib.suppress(DislockError):  # no lock server: each task says so
            watchdog = runtime_of(current_app).process.watchdog
            watchdog.showing.show = FigureFile(Path(folder)).write
            watchdog.showing.run(watchdog.clock())


def hide_figures(**_kwargs: Any) -> None:
    """Delete the file of this pool process; handles ``worker_process_shutdown``."""
    folder = os.environ.get(FOLDER)
    if folder and is_pool_process():
        with contextlib.suppress(DislockError):
            runtime_of(current_app).process.watchdog.showing.show = None
        FigureFile(Path(folder)).remove()


def inspect_locks(state: Any, shown: Sequence[str] | None = None, **_kwargs: Any) -> dict[str, Any]:
    """Leases held by this worker's processes, and how their renewal goes; "full": all figures."""
    told = figures_of(state.app, state.consumer.controller)
    # Celery's command line always gives a list; programs that ask leave it out, and get everything.
    return told if shown is None or FULL in shown else _in_short(told)


def _in_short(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker tells in a few lines: a line for each process of which to be told."""
    lines, quiet = [], 0
    for one in told["processes"]:
        troubles = [f"{one[what]} {what}" for what in ("outages", "errors") if one.get(what)]
        if one["unchanged_for"] is None:
            troubles.append("has not told its figures")
        if one.get("worst_late", 0) > LATE:
            troubles.append(f"renewed up to {for_people(one['worst_late'])} late")
        held = [
            f"{lease['key']} for {for_people(lease['held_for'])}" for lease in one.get("leases", ())
        ]
        if len(held) > SHORT:
            held[SHORT:] = [f"{one['held'] - SHORT} others"]
        if held or troubles:
            name = f"{'main ' if one['main'] else ''}{one['pid']}"
            lines.append(
                f"{name}: {', '.join([*(['holds ' + ', '.join(held)] if held else []), *troubles])}"
            )
        else:
            quiet += 1
    if quiet:
        lines.append(f"{number(quiet, 'process')} without a lease, and without trouble")
    return {**told, "tasks": len(told["tasks"]), "processes": lines}


def figures_of(app: Celery, worker: WorkController) -> dict[str, Any]:
    """
    Return what a worker tells of its locks, and each of its processes.  No round trip.

    Args:
        app: The worker's app.
        worker: The worker.
    """
    runtime = runtime_of(app)
    now = time.monotonic()
    guards = {name: getattr(task, "dislock_guard", None) for name, task in app.tasks.items()}
    told = about(runtime, {name: guard.options for name, guard in guards.items() if guard})
    told["warnings"] = [one for step in worker.steps for one in getattr(step, "warnings", ())]
    told["processes"] = []
    if told["no_server"] is None:
        watchdog = runtime.process.watchdog
        main = {"main": True, **read(watchdog.showing.figures(), now), "unchanged_for": 0.0}
        told["processes"] = [main, *_pool_processes(app, worker, now)]
    return told


def _pool_processes(app: Celery, worker: WorkController, now: float) -> list[dict[str, Any]]:
    if not _has_processes(worker):
        return []
    try:
        pids = list(worker.pool.info["processes"])
    except Exception:  # noqa: BLE001 -- the pool may be starting, or ending
        pids = []
    folder = _folders.get(app)
    found = folder.read(pids, now) if folder is not None else {}
    return [{"main": False, **found.get(pid, {"pid": pid, "unchanged_for": None})} for pid in pids]
