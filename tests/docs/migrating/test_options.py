"""What docs/migrating.md says of options: the same calls with the other library, and with ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from celery.utils.time import rate

from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import DuplicateTaskError
from tests.docs.migrating.libraries import (
    ALL,
    CELERY_HEIMDALL,
    CELERY_ONCE,
    CELERY_SINGLETON,
    DAY,
    HOUR,
    LIBRARIES_WARN,
    QUICK,
    Library,
    about,
    expiry_of,
    locks_of,
    messages,
    of,
    of_all,
    of_each,
    reservations,
)

pytestmark = LIBRARIES_WARN


A_MINUTE = {"lock_unique_for": 60}


class Case(NamedTuple):
    """How a key gets its expiry: the options, what a call is given, and when the keys end."""

    library: Library
    theirs: dict[str, Any]
    ours: dict[str, Any] = A_MINUTE
    call: dict[str, Any] = {}  # noqa: RUF012 -- nobody changes it
    ends: tuple[int, int] = (60, 60)


EXPIRIES = [
    Case(CELERY_SINGLETON, {"lock_expiry": 60}),
    Case(CELERY_ONCE, {"once": {"timeout": 60}}),
    Case(CELERY_HEIMDALL, {"heimdall": {**QUICK, "unique_timeout": 60}}),
    # There a call has its own expiry; here the task decides, and `once` does nothing.
    Case(CELERY_ONCE, {}, {}, {"once": {"timeout": 60}}, (60, HOUR)),
    *(Case(one, one.drops, {}, {}, (one.expiry, HOUR)) for one in ALL),
    *(Case(one, one.drops, {}, {"countdown": DAY}, (one.expiry, DAY + HOUR)) for one in ALL),
]


class TestOptions:
    """The tables of options: what they did there, and what does it here."""

    @pytest.mark.parametrize("case", EXPIRIES)
    def test_when_the_key_ends(self, app, theirs, ours, redis_client, case):
        """Of a message that never runs, as it was purged; ours is counted from when it is due."""
        theirs(case.library, case.theirs).apply_async((7,), **case.call)
        ours(**case.ours).apply_async((7,), **case.call)
        app.control.purge()
        left = locks_of(redis_client, case.library), reservations(redis_client)
        assert [expiry_of(redis_client, names) for names in left] == [about(n) for n in case.ends]

    @of_all
    def test_a_duplicate_is_an_exception(self, theirs, ours, redis_client, library):
        """Each has the first one's id, except celery-once's, which has the seconds to go."""
        module, name, what = library.error
        task = theirs(library, library.raises)
        first = task.delay(7)
        with pytest.raises(getattr(pytest.importorskip(module), name)) as refusal:
            task.delay(7)
        told = getattr(refusal.value, what)
        assert told == first.id or (what == "countdown" and 0 < told <= HOUR)
        task = ours(lock_key="export:<corp_id>", lock_on_duplicate="raise")
        first = task.delay(7)
        with pytest.raises(DuplicateTaskError) as caught:
            task.delay(7)
        assert (caught.value.key, caught.value.id) == ("export:7", first.id)
        assert messages(redis_client) == 2

    @of_each("has_the_id", [True, False, True])
    def test_a_duplicate_is_no_exception(self, theirs, ours, library, has_the_id):
        """Ours has the first one's result, as celery-singleton's and celery-heimdall's have."""
        task = theirs(library, library.drops)
        first, second = task.delay(7), task.delay(7)
        assert second.id == (first.id if has_the_id else None)
        task = ours(lock_on_duplicate="return")
        first, second = task.delay(7), task.delay(7)
        assert (second.id, second.duplicate) == (first.id, True)

    @pytest.mark.parametrize(
        ("celerys", "ours"),
        [("100/m", "100/m"), ("2/h", "2/h"), (10, 10), ("10", 10), ("0.5/s", "1/2s")],
    )
    def test_a_rate_is_written_as_celery_writes_it(self, celerys, ours):
        """Starts a second, as Celery's own function reads them."""
        read = Rate.of(ours)
        assert read.most / read.window == pytest.approx(rate(celerys))

    @of(CELERY_SINGLETON)
    def test_clear_locks_leaves_ours(self, app, theirs, ours, redis_client, library):
        """It ends what celery-singleton left behind, and may be called when ours are in use."""
        theirs(library, {}).delay(7)
        ours().delay(7)
        pytest.importorskip("celery_singleton").clear_locks(app)
        assert locks_of(redis_client, library) == []
        assert len(reservations(redis_client)) == 1
