"""Everything that celery-dislock raises, in one tree.

Each error carries its data as attributes and as its ``args``: Celery rebuilds an exception from
those on the other side of a pool process or a result backend.
"""

from __future__ import annotations


class DislockError(Exception):
    """Base of every error of this package."""


class SettingsError(DislockError, ValueError):
    """An option or setting cannot be used.

    Raised when a task is bound, a lock is made in plain Python or a worker starts; and by a task
    whose ``lock_on_conflict`` is a callable that returned what is no strategy.

    Attributes:
        owner: Whose option it is: a task's name, or ``app.conf``.
        option: Name of the option or setting.
        value: The value that was refused.
        remedy: What to give instead.
    """

    def __init__(self, owner: str, option: str, value: object, remedy: str) -> None:
        super().__init__(owner, option, value, remedy)
        self.owner = owner
        self.option = option
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.owner}: {self.option}={self.value!r}: {self.remedy}"


class LockKeyError(DislockError, ValueError):
    """The key of a lock cannot be built from these arguments; nothing was locked or run.

    Attributes:
        template: The key template, or the name of the callable, as declared.
        argument: The argument at fault, or None where it is not a single one.
        reason: What is wrong with it, and what is allowed.
    """

    def __init__(self, template: str, argument: str | None, reason: str) -> None:
        super().__init__(template, argument, reason)
        self.template = template
        self.argument = argument
        self.reason = reason

    def __str__(self) -> str:
        argument = f", argument <{self.argument}>" if self.argument else ""
        return f"lock_key {self.template!r}{argument}: {self.reason}"


class LockHeldError(DislockError):
    """The lock is held by another; the body was not run.

    In plain Python: by this very thread, under another set of keys; it would wait for itself.

    Attributes:
        key: The key of the lock.
        holder: Who holds it, in words: task, task id, worker and process.
        remaining: Seconds until the holder's lease ends, unless it is renewed.
    """

    def __init__(self, key: str, holder: str, remaining: float) -> None:
        super().__init__(key, holder, remaining)
        self.key = key
        self.holder = holder
        self.remaining = remaining

    def __str__(self) -> str:
        return (
            f"lock {self.key!r} is held by {self.holder}, "
            f"for {self.remaining:.1f} s more unless renewed"
        )


class LockTermsError(LockHeldError):
    """The caller itself holds the lock, and asked for it once more on other terms.

    Nothing was changed.  To wait would be to wait for oneself.

    Attributes:
        held: The terms that differ, as the lock is held.
        asked: The same terms, as they were asked for.
    """

    def __init__(self, key: str, holder: str, remaining: float, held: str, asked: str) -> None:
        super().__init__(key, holder, remaining)
        self.args = (key, holder, remaining, held, asked)
        self.held = held
        self.asked = asked

    def __str__(self) -> str:
        return (
            f"lock {self.key!r} is held by {self.holder} with {self.held}, and cannot be taken "
            f"with {self.asked} as well: release it first, or ask for the terms that it has"
        )


class EventLoopError(DislockError, RuntimeError):
    """A blocking lock was asked for inside a running event loop; nothing was asked or changed.

    All coroutines of a thread would own it together.

    Attributes:
        key: The key of the lock.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"lock {self.key!r}: an event loop runs in this thread, whose coroutines would all own "
            "the lock together. Put the whole `with` block into a function, and run that in a "
            "thread: await asyncio.to_thread(function)"
        )


class NotOwnerError(DislockError):
    """A lock was released or extended by a thread that does not hold it; nothing was changed.

    Attributes:
        key: The key of the lock.
        holder: Who holds it, in words; empty where nobody does.
    """

    def __init__(self, key: str, holder: str) -> None:
        super().__init__(key, holder)
        self.key = key
        self.holder = holder

    def __str__(self) -> str:
        return f"lock {self.key!r} is not held by this thread, but by {self.holder or 'nobody'}"


class LockLostError(DislockError):
    """This process can no longer trust its lease; another execution may hold the lock by now.

    Attributes:
        key: The key of the lock.
        reason: Why: expired, taken over, not renewed in time, or capped.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"lock {self.key!r} is lost: {self.reason}"


class StoreError(DislockError):
    """The lock server did not answer, or refused.

    A lock that was asked for may have been taken all the same: then it ends with its expiry, or
    at once when its owner asks again.

    Attributes:
        server: The server's URL, without its password.
        reason: What went wrong, in the server's or the client's words.
    """

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(server, reason)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return f"lock server {self.server}: {self.reason}"


class DamagedLockError(StoreError):
    """What stands on the lock server under a lock's name is not what this package writes there.

    A key of another type, or a record that cannot be read.  The server is well, and so are all
    other locks; this one cannot be used until somebody has looked at it.

    Attributes:
        server: The server's URL, without its password.
        reason: What is wrong, with the key.
        lock: The lock's name in Redis; all other keys of the lock begin so.
    """

    def __init__(self, server: str, reason: str, lock: str) -> None:
        super().__init__(server, reason)
        self.args = (server, reason, lock)
        self.lock = lock

    def __str__(self) -> str:
        return (
            f"lock server {self.server}: {self.lock!r} cannot be used: {self.reason}. Rename or "
            "delete the key that is wrong; if a later version of celery-dislock wrote it, update "
            "this worker"
        )
