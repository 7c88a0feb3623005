"""What a delivery of a task is called on the lock server."""

from types import SimpleNamespace

import pytest

from celery_dislock.keys.names import (
    body_owner,
    body_owners_start,
    execution_start,
    owners_start,
    reserved_name,
    shown_id,
    task_id_of,
    task_id_of_reserved,
    task_name,
    ticket_of_request,
)

PLAIN = [
    "f8c3de3d-1fea-4d7c-a8b0-29f63c4c3454",
    "order:7",
    "bytes",
    "x#",
    "a b",
    "Ünï",
    "x" * 10**5,
]
HOSTILE = ["a@w:1/", "a@", "~a", "a%40", "@", "", "a\nb", "\ud800", 7, None]


def ticket(task_id, retries=0, nesting=0):
    return ticket_of_request(
        SimpleNamespace(id=task_id, retries=retries, replaced_task_nesting=nesting)
    )


@pytest.mark.parametrize("task_id", PLAIN)
def test_a_plain_id_is_its_own_name(task_id):
    """What an operator reads on the lock server is the id that the log shows."""
    assert task_name(task_id) == task_id


def test_no_tasks_owners_begin_as_anothers():
    """Whatever two ids are, neither's prefix takes an owner of the other for its own."""
    ids = [str(one) for one in [*PLAIN, *HOSTILE, "a", "a@w", "a@w:1/x@w:1/", "order"]]
    for one in ids:
        for other in set(ids) - {one}:
            owner = f"{execution_start(other, 'w', 1)}nonce.1"
            assert not owner.startswith((owners_start(one), body_owners_start(one)))
            assert not owner.startswith(execution_start(one, "w", 1))
            of_body = body_owner(other, "nonce.1", "w:1:2/")
            assert not of_body.startswith((owners_start(one), body_owners_start(one)))
            assert not ticket(other).startswith(owners_start(one))


@pytest.mark.parametrize("task_id", [*PLAIN, *HOSTILE])
def test_a_name_can_be_sent(task_id):
    """It is UTF-8, whatever the id holds, and no owner looks like a lease that runs out."""
    for name in (execution_start(task_id, "w", 1), body_owner(task_id, "nonce.1", "w:1:2/")):
        name.encode()
        assert not name.startswith("~")


@pytest.mark.parametrize("given", ["7:0", "1", None, -1, 10**10, 1.5, [1], {}])
def test_a_ticket_has_numbers_whatever_a_message_says(given):
    """A number of retries that is text would name another task's ticket: "order" and "order:7"."""
    assert ticket("order", given, 0) == "order:0:0"
    assert ticket("order", 2, given) == "order:2:0"


@pytest.mark.parametrize("task_id", [*PLAIN, *HOSTILE, "a b,c", "%zz"])
def test_a_name_leads_back_to_its_id(task_id):
    """Else an operator could not end what the task has reserved."""
    assert task_id_of_reserved(reserved_name(task_id)) == str(task_id)
    assert task_id_of(ticket(task_id)) == str(task_id)


def test_a_name_that_nobody_has_encoded_is_shown_as_it_is():
    """It was written by hand."""
    assert task_id_of_reserved("%FF%41") == "%FF%41"


@pytest.mark.parametrize("task_id", [*HOSTILE, float("nan"), "x" * 10**5, [1]])
def test_an_id_is_told_as_text_of_limited_length(task_id):
    """A number that JSON does not have would make the holder's record unreadable for others."""
    told = shown_id(task_id)
    assert isinstance(told, str)
    assert len(told) < 1010
