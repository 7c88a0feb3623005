"""What is relied on of Celery, kombu and redis-py is so, and a worker notices if it is not."""

import re

import pytest
from celery import Celery

from celery_dislock import hooks
from celery_dislock.exceptions import DislockError
from celery_dislock.worker import contract

_, _, rows, _ = hooks.__doc__.split("\n====")
WRAPPED = [row.replace("``", "") for row in re.findall(r"^([^=\s].*?) {2,}", rows, re.MULTILINE)]


@pytest.mark.parametrize("name", contract.FACTS)
def test_what_is_relied_on_is_so(name):
    """With the versions that are installed here; `make test-next` installs those to come."""
    assert [fact() for fact in contract.FACTS[name]]
    assert all(fact() for fact in contract.FACTS[name])


def test_each_wrapped_place_has_its_facts():
    """The table of hooks.py names all that is wrapped."""
    assert len(WRAPPED) > 10
    assert [*contract.FACTS][: len(WRAPPED)] == WRAPPED


@pytest.fixture
def newer(monkeypatch):
    """Celery is of a later minor version than those that were tried."""
    monkeypatch.setattr(
        contract, "version", lambda name: "5.99.0rc1" if name == "celery" else "5.0"
    )


def test_versions_that_were_tried_are_not_checked(monkeypatch):
    """A worker's start is not slowed down."""
    monkeypatch.setattr(contract, "version", lambda _name: "5.7.1")
    monkeypatch.setattr(contract, "broken", None)
    assert contract.about_versions() == []


@pytest.mark.usefixtures("newer")
def test_a_newer_celery_is_told_once():
    """The worker starts, as all that locks rely on is as it was."""
    [warning] = contract.about_versions()
    assert warning.startswith("celery 5.99.0rc1 is newer than")


def sends_a_mapping(self, message):
    """Stand for a ``send_task`` of a Celery to come."""


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("of", "name", "changed", "told"),
    [
        (Celery, "send_task", sends_a_mapping, "Celery.send_task"),
        (contract.trace, "task_has_custom", lambda *_: False, "a task class's __call__"),
        (contract.trace, "task_has_custom", None, "a task class's __call__"),
        (contract.signals.task_prerun, "providing_args", set(), "a task class's __call__"),
    ],
)
def test_a_newer_celery_in_which_locks_would_not_work_is_refused(
    monkeypatch, of, name, changed, told
):
    """No task runs without its lock; the error names what has changed."""
    monkeypatch.setattr(of, name, changed)
    assert told in contract.broken()
    with pytest.raises(DislockError, match=f"as these have changed: .*{re.escape(told)}"):
        contract.about_versions()
