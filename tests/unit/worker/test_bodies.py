"""What a pool process had locked in plain Python is released when it has died, and only then."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from celery.concurrency import solo

from celery_dislock import Dislock
from celery_dislock.locks import journal
from celery_dislock.locks.callers import current_caller
from celery_dislock.locks.journal import Journal
from celery_dislock.parking.process import runtime_of
from celery_dislock.worker import bodies
from celery_dislock.worker.bodies import FOLDER, BodyStep

SOON = 1.0  # seconds


@pytest.fixture
def dead(monkeypatch):
    """All processes live, but for these."""
    dead = set()
    monkeypatch.setattr(bodies, "is_alive", lambda pid: pid not in dead)
    return dead


@pytest.fixture
def locks(app, worker, dead, tmp_path, monkeypatch):
    """Locks of a pool process of a worker that looks after its processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    step = BodyStep(worker)
    worker.steps = [step]
    assert step.include_if(worker)
    step.start(worker)
    locks = Dislock(app)
    monkeypatch.setattr("celery_dislock.locks.runtime.is_pool_process", lambda: True)
    locks.runtime.process.journal = Journal(locks.runtime.journals_in)
    yield locks
    current_caller().leases.clear()  # this process lives on


def noted(locks):
    """Return the owners in the journal of this process."""
    return [one.owner for one in journal.read(Path(locks.runtime.journals_in, str(os.getpid())))]


def test_its_locks_are_free_soon_after_its_death(locks, dead, lock_server, caplog):
    """All of them, also those with a fixed expiry; what it has released since costs one request."""
    for key, options in (("a", {}), (["b", "c"], {}), ("d", {"expire": 3600})):
        assert locks.lock(key, **options).try_acquire()
    lock_server.advance(SOON)
    assert all(locks.lock_of(key).holders() for key in "abcd")
    dead.add(os.getpid())
    caplog.set_level("INFO", "celery_dislock")
    lock_server.advance(SOON)
    assert [key for key in "abcd" if locks.lock_of(key).holders()] == [], caplog.text
    said = [one.getMessage() for one in caplog.records if "Released lock" in one.getMessage()]
    assert len(said) == 3
    assert f"of thread MainThread on {locks.runtime.process.host} (pid {os.getpid()})" in said[0]
    assert not list(Path(locks.runtime.journals_in).iterdir())


def test_what_has_ended_is_noted_no_more(locks, lock_server):
    """Nor what was refused; so the journal stays short, whatever a process does."""
    with locks.lock("held") as lease:
        for nth in range(100):
            locks.lock(f"k{nth}").acquire()
            locks.lock(f"k{nth}").release()
        with locks.lock("last") as last:
            assert noted(locks) == [last.owner, lease.owner]


def test_a_lock_server_that_is_away_keeps_nobody(locks, dead, lock_server, caplog):
    """It is asked once for each lock, and the lease is left to expire."""
    assert locks.lock("a").try_acquire()
    dead.add(os.getpid())
    lock_server.away = True
    lock_server.advance(SOON)
    assert "Could not release lock 'a' of thread MainThread" in caplog.text
    before = lock_server.requests
    lock_server.advance(SOON)
    assert lock_server.requests - before <= SOON * 10  # of the watchdog, which lives here
    lock_server.away = False


@pytest.mark.parametrize("damage", [b"", b"[", b"7\n", b'["a"]\n', b'[["n", "o"]]\n', b"\xff\n"])
def test_a_journal_that_cannot_be_read_is_empty(locks, dead, lock_server, damage):
    """As of a process that died before it had written any, or on a full disk."""
    path = Path(locks.runtime.journals_in, "12345")
    path.write_bytes(damage)
    dead.add(12345)
    lock_server.advance(SOON)
    assert not path.exists()


def test_a_disk_that_is_full_stops_no_body(locks, monkeypatch):
    """The lock is taken, and expires if its process dies."""

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with locks.lock("a") as lease:
        assert lease.held
    assert noted(locks) == []


def test_what_a_killed_worker_has_left_is_removed(app, worker, tmp_path, monkeypatch):
    """By the next one; not what another worker uses, or what only has such a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = Path(tempfile.mkdtemp(prefix="others", dir=tmp_path))
    used, left, link, file = (tmp_path / f"{FOLDER}{name}" for name in ("a", "b", "c", "d"))
    for folder in (used, left):
        folder.mkdir()
        (folder / "12345").touch()
    link.symlink_to(others)
    file.touch()
    (others / "kept").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        assert BodyStep(worker).include_if(worker)
        assert (left / "12345").exists(), "another user's"
    other = os.open(used, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert BodyStep(worker).include_if(worker)
    own = runtime_of(app).journals_in
    assert BodyStep(worker).include_if(worker)
    os.close(other)
    assert (used / "12345").exists()
    assert Path(own).is_dir()
    assert not left.exists()
    assert (others / "kept").exists()
    assert file.exists()


def test_it_is_for_prefork_and_where_there_is_a_folder(app, worker, monkeypatch, caplog):
    """Other pools have no process that dies alone; without a folder the log says so."""
    step = BodyStep(worker)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "pool_cls", solo.TaskPool)
        assert not step.include_if(worker)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError("none")))
    assert not step.include_if(worker)
    assert "not written down for crash release: none" in caplog.text
    assert runtime_of(app).journals_in is None
