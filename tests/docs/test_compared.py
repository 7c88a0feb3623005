"""
What docs/explanation/compared.md says of other libraries, shown with the libraries themselves.

A peer that is not installed skips its tests.  Each test starts from what a user of that library
writes, and looks at what is in Redis afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError
from redis.retry import Retry

LIMIT = 30.0  # seconds for what takes milliseconds
POLL = 0.01  # seconds between two looks
EXPIRY = 3600  # seconds
KEY = "export:7"


class LosesReplies(redis.Redis):
    """A client that gets no reply to its first command of one kind, although it was carried out."""

    lost: str | None = None

    def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:
        answer = super().parse_response(connection, command_name, **options)
        if command_name == self.lost:
            self.lost = None
            connection.disconnect()
            msg = "the reply was lost"
            raise redis.ConnectionError(msg)
        return answer


class TestRedisPy:
    def test_a_lost_reply_hides_its_own_lock(self, redis_url, redis_client):
        """A client that sends SET NX again then takes its own lock for somebody else's."""
        again = {"retry": Retry(NoBackoff(), 1), "retry_on_error": [redis.ConnectionError]}
        with LosesReplies.from_url(redis_url, **again) as client:
            client.lost = "SET"
            assert not client.lock(KEY).acquire(blocking=False)
        assert redis_client.ttl(KEY) == -1  # taken, for ever

    def test_a_release_that_fails_cannot_be_tried_again(self, redis_url, redis_client):
        """A release that did not reach the server forgets the token: the lock has to expire."""
        with redis.Redis.from_url(redis_url) as client:
            lock = client.lock(KEY, timeout=EXPIRY)
            lock.acquire()
            with pytest.MonkeyPatch.context() as patch:

                def evalsha(*args: Any) -> None:
                    raise redis.ConnectionError

                patch.setattr(client, "evalsha", evalsha)
                with pytest.raises(redis.ConnectionError):
                    lock.release()
            with pytest.raises(LockError, match="Cannot release"):
                lock.release()
        assert redis_client.ttl(KEY) > 0

    def test_nobody_renews_it_and_only_its_owner_releases_it(self, redis_client):
        """A body that outlasts the expiry is overtaken; it cannot release the next one's lock."""
        first = redis_client.lock(KEY, timeout=0.05)
        second = redis_client.lock(KEY, timeout=EXPIRY)
        first.acquire()
        assert second.acquire(blocking_timeout=LIMIT)
        with pytest.raises(LockNotOwnedError):
            first.release()
        assert second.owned()


class TestPythonRedisLock:
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_one_failed_renewal_is_the_last(self, redis_url, redis_client):
        """The thread that renews ends at its first error, and the holder is not told."""
        peer = pytest.importorskip("redis_lock")
        with redis.Redis.from_url(redis_url) as client:
            lock = peer.Lock(client, KEY, expire=EXPIRY, auto_renewal=True)
            lock._lock_renewal_interval = POLL

            def extend(expire: int) -> None:
                raise redis.ConnectionError

            lock.extend = extend
            lock.acquire()
            lock._lock_renewal_thread.join(LIMIT)
            assert not lock._lock_renewal_thread.is_alive()
            assert lock.locked()
            lock.release()
