"""The types of a task's options beside the options."""

import re
from dataclasses import fields

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.config.settings import task_options
from celery_dislock.exceptions import SettingsError
from celery_dislock.tasks.declaring import DeclaredOptions, LockOptions

TYPES = {name: one.__forward_arg__ for name, one in LockOptions.__annotations__.items()}


def test_every_option_has_a_type_and_no_other():
    """In the order of the declarations; and no option of Celery's has a name of ours."""
    assert list(TYPES) == [f.name for f in fields(TaskOptions)]
    of_celery = set(DeclaredOptions.__annotations__) - set(TYPES)
    assert not [name for name in of_celery if name.startswith("lock_")]
    assert {"max_retries", "autoretry_for", "acks_late", "queue"} <= of_celery


@pytest.mark.parametrize("name", [name for name, one in TYPES.items() if "Literal['" in one])
def test_a_type_allows_the_values_that_the_check_allows(name):
    """A value that is refused names all that are allowed."""
    with pytest.raises(SettingsError) as caught:
        task_options("t", {name: "?"}, {})
    literal = re.search(r"Literal\[([^]]*)\]", TYPES[name])[1]
    assert re.findall(r"'(\w+)'", caught.value.remedy) == re.findall(r"'(\w+)'", literal)
