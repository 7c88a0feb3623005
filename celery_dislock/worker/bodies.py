"""Release what the bodies of a pool process had locked when it died.

A task's own lock is released by its request; see :mod:`celery_dislock.tasks.request`.  Locks that a
body takes by ``dislock.lock()``, also that of a task without a ``lock_key``, are known to their
process alone, which has written them down; see :mod:`celery_dislock.locks.journal`.

The folder of the journals is removed at the exit.  A worker whose main process is killed leaves it;
the next worker of the same user removes it.  All processes of a worker hold one flock of the
folder, which ends with the last of them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.journal import read
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.records import in_words
from celery_dislock.tasks.request import is_alive
from celery_dislock.worker.timed import LastingStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery.worker import WorkController

LOOK_EVERY = 0.25  # seconds
FOLDER = "dislock-bodies-"  # how the name of a folder begins
AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB

logger = logging.getLogger("celery_dislock")


class BodyStep(LastingStep):
    """Bootstep of a prefork worker: releases what bodies had locked in processes that died."""

    label = "Dislock bodies"
    every = LOOK_EVERY

    def include_if(self, worker: WorkController) -> bool:
        """Make the folder of the journals, before any pool process is forked."""
        self._runtime = runtime_of(worker.app)
        forks = getattr(worker.pool_cls, "uses_semaphore", False)  # prefork alone does
        if self._runtime.off or not forks:
            return False
        try:
            self._folder = _make_folder()
        except OSError as exc:
            #: WARNING: A lock that a body takes by `dislock.lock()` is left to expire if its
            #: process dies. -> Give the worker a folder for temporary files.
            logger.warning("Locks that bodies take are not written down for crash release: %s", exc)
            return False
        _remove_left()
        self._runtime.journals_in = str(self._folder)
        atexit.register(_remove, self._folder, os.getpid())
        return True

    def connect(self) -> None:
        """Make a store that is used here alone."""
        self._store = self._runtime.new_process().store

    def work(self) -> None:
        """Look for journals of processes that have ended."""
        for path in self._folder.iterdir():
            pid = int(path.name)
            if not is_alive(pid):
                entries = read(path)
                path.unlink(missing_ok=True)
                for names, owner, holder in entries:
                    self._release(names, owner, in_words(holder), pid)

    def _release(self, names: Sequence[str], owner: str, who: str, pid: int) -> None:
        key = " + ".join(map(key_of, names))
        try:
            if self._store.release(names, owner):
                #: INFO: The next one can take it. -> Find out why the process died.
                logger.info("Released lock %r of %s: process %d died.", key, who, pid)
        except StoreError as exc:
            #: WARNING: Who wants the lock waits for one timeout at most. -> Check the lock server.
            logger.warning(
                "Could not release lock %r of %s, whose process %d died; it is left to expire: %s",
                *(key, who, pid, exc),
            )


def _make_folder() -> Path:
    """Make a folder that is ours until the last process that is forked from this one has ended."""
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}"))
    with contextlib.suppress(OSError):  # a file system without: others cannot lock it, either
        fcntl.flock(os.open(made, os.O_RDONLY), AT_ONCE)
    return made.rename(made.with_name(made.name[1:]))  # found by others now that it is locked


def _remove_left() -> None:
    """Remove the folders of workers of this user that have ended without."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or gone
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if os.fstat(folder).st_uid == os.getuid():
                    fcntl.flock(folder, AT_ONCE)
                    shutil.rmtree(path)
            finally:
                os.close(folder)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process inherits what is called at the exit
        shutil.rmtree(folder, ignore_errors=True)
