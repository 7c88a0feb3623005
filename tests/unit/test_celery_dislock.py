"""What users import."""

import celery_dislock
from tests.programs import run_code


def test_the_public_names_are_pinned():
    """What can be imported from the package is decided, not accidental."""
    assert celery_dislock.__all__ == [
        *("Dislock", "SingletonTask", "Key", "current_lease", "ensure_held", "Lease"),
        *("ReentrantLock", "AsyncLock", "Conflict", "DislockError", "SettingsError"),
        *("LockKeyError", "LockHeldError", "DuplicateTaskError", "NoResultError", "LockLostError"),
        *("SupersededError", "TaskCrashedError", "NotOwnerError", "EventLoopError", "StoreError"),
        "DamagedLockError",
    ]
    assert all(hasattr(celery_dislock, name) for name in celery_dislock.__all__)


# What a process that sends tasks does not use, and what takes longest to import.
NOT_IMPORTED = (
    *("celery.app.control", "celery.bin", "celery.worker", "celery.concurrency", "pygments"),
    *("celery_dislock.operating.cli", "celery_dislock.operating.web", "celery_dislock.operating.o"),
    "celery_dislock.operating.checks",
    *("celery_dislock.worker", "celery_dislock.tasks.request", "celery_dislock.servers.cluster"),
    *("celery_dislock.servers.quorum", "celery_dislock.servers.sentinel"),
)

PROGRAM = """
import sys
from celery import Celery, Task
import redis
Celery("other", broker="memory://", set_as_current=False)  # imports what Celery's apps need
before = set(sys.modules)
from celery_dislock import Dislock, SingletonTask
app = Celery("shop", broker="memory://", set_as_current=False)
dislock = Dislock(app)
@app.task(base=SingletonTask, lock_key="export:<corp_id>")
def export(corp_id): ...
app.finalize()
dislock.lock("export:7")
print(*sorted(set(sys.modules) - before))
"""


def test_a_web_process_imports_what_it_needs():
    """A worker, the command line and the page cost nothing where they are not used."""
    imported = run_code(PROGRAM).stdout.split()
    assert "celery_dislock.plugin" in imported
    assert [name for name in imported if name.startswith(NOT_IMPORTED)] == []
