"""What users import."""

from __future__ import annotations

import celery_dislock


def test_the_public_names_are_pinned():
    """What can be imported from the package is decided, not accidental."""
    assert celery_dislock.__all__ == [
        "Dislock",
        "SingletonTask",
        "current_lease",
        "Lease",
        "ReentrantLock",
        "DislockError",
        "SettingsError",
        "LockKeyError",
        "LockHeldError",
        "LockLostError",
        "NotOwnerError",
        "StoreError",
        "DamagedLockError",
    ]
    assert all(hasattr(celery_dislock, name) for name in celery_dislock.__all__)
