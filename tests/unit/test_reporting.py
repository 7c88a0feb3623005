"""One log line for each thing that happens to a task."""

import logging
import re

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import SingletonTask
from celery_dislock.messages.delivery import Delivery
from tests.declaring import declare, never
from tests.driven import held
from tests.unit.deliveries import deliver


@pytest.fixture
def both(caplog):
    """The lines of both loggers at INFO and above."""
    caplog.set_level(logging.INFO, "celery_dislock")
    caplog.set_level(logging.INFO, "celery.app.trace")
    return caplog


def run(app, error, logged="", task_id="1"):
    """Run a guarded task whose body ends so; with what is logged of it."""

    @app.task(base=SingletonTask, name="shop.export", lock_key="k", bind=True)
    def export(self):
        if logged:
            Delivery.of(self.request).logged(error, logged)
        raise error

    export.apply(task_id=task_id)


@pytest.mark.parametrize(
    ("error", "logged", "level", "line"),
    [
        (Ignore("why"), "does not run", logging.INFO, "does not run"),
        (Reject("why"), "does not run", logging.INFO, "does not run"),
        (Retry("why", when=2), "does not run", logging.INFO, "does not run"),
        # Only we know what ours have told: Celery's stays about a body's own.
        (Ignore("why"), "", logging.INFO, "ignored"),
        (Retry("why", when=2), "", logging.INFO, "retry: why"),
        (ValueError("why"), "", logging.INFO, "raised unexpected: ValueError('why')"),
        # A logger that shows no INFO of ours shows that of Celery.
        (Ignore(), "does not run", logging.WARNING, "ignored"),
    ],
)
def test_celerys_line_is_left_out_where_ours_has_told_it(app, both, error, logged, level, line):
    """Whatever the exception; ours has the task's name and id."""
    logging.getLogger("celery_dislock").setLevel(level)
    run(app, error, logged)
    assert both.messages == [f"Task shop.export[1] {line}"]


@pytest.mark.parametrize(
    ("level", "text", "line"),
    [
        (logging.INFO, "a\x1b[2Jb\nTask x[1] is done", "a\\x1b[2Jb\\nTask x[1] is done"),
        (logging.ERROR, "\u061c\u2060\U000e0041", "\\u061c\\u2060\\U000e0041"),
        (logging.ERROR, "\xad\ud800", "\\xad\\ud800"),
        (logging.WARNING, "100%s", "100%s"),
        (logging.WARNING, "\x1b100%s", "\\x1b100%s"),
    ],
)
def test_a_strangers_id_writes_no_line_and_no_command(app, both, level, text, line):
    """Whichever module logs it: one record is one line, which a terminal shows as it is."""
    logging.getLogger("celery_dislock").log(level, "Task %s has ended: %r", text, ValueError(7))
    assert both.messages == [f"Task {line} has ended: ValueError(7)"]
    run(app, Ignore("why"), "does not run", text)
    assert both.messages[1] == f"Task shop.export[{line}] does not run"


def test_a_line_of_text_keeps_its_parts(both):
    """Tools that group log lines go by the message without its arguments."""
    logging.getLogger("celery_dislock").info("Task %s", "Zürich")
    assert (both.records[0].msg, both.records[0].args) == ("Task %s", ("Zürich",))


HOLDER = r"shop\.holder\d+\[1\] on w1 \(pid \d+\)"
IS_HELD = f"lock 'k' is held by {HOLDER}, for "


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        ("skip", rf"INFO .* skipped: {IS_HELD}.* s more unless renewed\. It does not run\."),
        ("raise", rf"ERROR .* raised unexpected: LockHeldError\('k', '{HOLDER}', .*"),
        ("retry", rf"INFO .* put off for \S+ s: {IS_HELD}.*"),
        ("reject", rf"INFO .* rejected: {IS_HELD}.* Its message goes to the dead-letter .*"),
        ("queue", rf"INFO .* parked: place 1 in line for lock 'k', held by {HOLDER}, for .*"),
    ],
)
@pytest.mark.usefixtures("broker")
def test_a_conflict_is_told_to_the_caller_and_in_one_line(app, both, strategy, line):
    """Key, holder and what becomes of the task are in the result, and in the log."""
    with held(app):
        deliver(declare(app, never, lock_on_conflict=strategy, acks_late=True), "2")
        [said] = both.records
        assert re.fullmatch(line, f"{said.levelname} {said.getMessage().splitlines()[0]}"), said
        assert "shop.t[2]" in said.getMessage()
    told = app.AsyncResult("2").result
    if told is not None:  # Celery's main process tells who is rejected
        assert re.search(f"'k'.*{HOLDER}", str(told))
