"""``why``: the sentence of each state in which a task can be, what it rests on, and what to do."""

from __future__ import annotations

import pytest

from tests.staged import holder, lock, place


@pytest.fixture
def workers(app, monkeypatch):
    """What the workers answer, by their names; they are asked for one task."""
    answers = {}

    def broadcast(_command, *, arguments, callback, **_how):
        for name, one in answers.items():
            callback({name: {"queues": [], "locks": True, "is": None, **one}})

    monkeypatch.setattr(app.control, "broadcast", broadcast)
    return answers


def test_a_task_in_line_is_told_behind_whom(dislock, server, workers):
    """Its place, and who holds the lock for how long; what to type comes last."""
    server.put(lock("k", holders=[holder()], waiting=3, line=[place(1), place(2), place(3)]))
    told = dislock.json("why", "parked-2")
    assert told["state"] == "in line"
    assert told["sentence"] == (
        "shop.pay[parked-2] is 2nd of 3 in line for lock 'k', which shop.export[id-1] on celery@w1 "
        "(pid 7) has held for 61 s."
    )
    assert told["about"]["place"] == 2
