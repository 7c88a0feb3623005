"""What a failover of the lock server loses, and what it answers, and what senders make of it."""

import pytest

from celery_dislock.exceptions import ForbiddenError, StoreError
from tests.declaring import declare
from tests.driven import LockServer, reservation
from tests.unit.deliveries import deliver

RECORD = "dislock:{k}:unique"
KEPT = 45  # seconds: lock_unique_for


class Edits:
    """A unique task, and what it has run."""

    def __init__(self, app, server, broker, **options):
        self.ran = []

        def edit(doc):
            self.ran.append(doc)

        self.task = declare(app, edit, **options)
        self._server, self._broker = server, broker

    def send(self, doc):
        return self.task.delay(doc)

    def reserved_for(self):
        found = reservation(self.task, 0)
        return found and found.id

    def run(self, number):
        """Run the task of a message."""
        sent = self._broker.sent[number]
        deliver(self.task, sent.id, number + 1, headers=sent.headers)

    def record(self):
        return self._server.send("GET", RECORD)

    def fail_over(self, record=None):
        """Let a replica take over that knows no more than this."""
        self._server.send("DEL", RECORD)
        if record:
            self._server.send("SET", RECORD, record, "PX", KEPT * 1000)


@pytest.fixture
def edits(app, lock_server, broker):
    return lambda **options: Edits(app, lock_server, broker, **options)


def test_a_failover_that_loses_a_reservation(edits, lock_server):
    """Two messages are sent, and both run; the first ends nothing of the second's."""
    edit = edits(lock_unique_until="end")
    first = edit.send(1)
    assert edit.reserved_for() == first.id
    edit.fail_over()
    second = edit.send(2)
    assert (second.duplicate, edit.reserved_for()) == (False, second.id)
    edit.run(0)
    assert (edit.ran, edit.reserved_for()) == ([1], second.id)
    edit.run(1)
    assert edit.ran == [1, 2]
    assert lock_server.contents() == {}


def test_a_failover_that_loses_a_replacement(edits):
    """The older message does not learn that it was replaced: it runs as well, and first."""
    edit = edits(lock_unique_until="start", lock_on_duplicate="replace")
    first = edit.send(1)
    known = edit.record()
    second = edit.send(2)
    assert edit.reserved_for() == second.id
    edit.fail_over(known)
    assert edit.reserved_for() == first.id
    edit.run(0)
    edit.run(1)
    assert edit.ran == [1, 2]
    assert edit.reserved_for() is None


def test_a_failover_that_loses_an_end(edits):
    """The key stays reserved for a task that is over, as after a purge: for lock_unique_for."""
    edit = edits(lock_unique_until="end", lock_unique_for=KEPT)
    first = edit.send(1)
    known = edit.record()
    edit.run(0)
    assert edit.reserved_for() is None
    edit.fail_over(known)
    again = edit.send(2)
    assert (again.id, again.duplicate) == (first.id, True)
    assert 0 <= reservation(edit.task, 0).remaining <= KEPT


@pytest.mark.parametrize(
    "error", [StoreError(LockServer.name, "READONLY"), ForbiddenError(LockServer.name, "NOPERM")]
)
def test_a_server_that_answers_errors(edits, lock_server, broker, caplog, error):
    """As one that does not answer: all is sent, with one warning, and it is left alone."""
    edit = edits(lock_unique_until="start")
    lock_server.strike(error)
    edit.send(1)
    asked = lock_server.requests
    for doc in range(5):
        edit.send(doc)
    assert lock_server.requests == asked
    assert [message.notes.get("unique") for message in broker.sent] == [None] * 6
    assert caplog.text.count("are sent without reservations") == 1
