"""What docs/migrating.md says of options: the same calls with the other library, and with ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.lock import Lock as RedisLock

from celery_dislock import SettingsError, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError
from celery_dislock.servers.reservations import Reservations
from tests.docs.migrating.libraries import (
    CELERY_HEIMDALL,
    CELERY_ONCE,
    CELERY_SINGLETON,
    HOUR,
    LIBRARIES_WARN,
    QUEUE,
    QUICK,
    about,
    database,
    expiry_of,
    export,
    locks_of,
    messages,
    of,
    of_all,
    of_each,
    reservations,
)

if TYPE_CHECKING:
    from celery import Celery

pytestmark = LIBRARIES_WARN


def refused(app: Celery, **options: Any) -> str:
    """Declare a task of ours with an option of another library, and return what is said."""
    with pytest.raises(SettingsError) as caught:
        app.task(base=SingletonTask, name="refused", shared=False, **options)(export)
        app.finalize()
    assert "refused" not in app.tasks
    return str(caught.value)


class TestOptions:
    """The tables of options: what they did there, and what does it here."""

    @of_all
    def test_a_base_class_and_one_option(self, theirs, ours, redis_client, library):
        """Of two equal calls one is sent, by each of the two."""
        for task in (theirs(library, library.drops), ours(lock_on_duplicate="return")):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.delay(7)
            task.delay(8)
            assert messages(redis_client) == 2

    @of_all
    def test_arguments_that_make_the_key(self, theirs, ours, redis_client, library):
        """A second export of the same corp in another format is a duplicate."""
        for task in (theirs(library, library.by_corp), ours(lock_key="export:<corp_id>")):
            redis_client.delete(QUEUE)
            task.delay(7, "csv")
            task.delay(7, "pdf")
            task.delay(8, "csv")
            assert messages(redis_client) == 2

    @of_each("different", [2, 1, 2])
    def test_all_arguments_make_the_key(self, theirs, ours, redis_client, library, different):
        """Here it does not matter whether an argument is given by its name or by its place."""
        for task, sent in ((theirs(library, library.drops), different), (ours(), 1)):
            redis_client.delete(QUEUE)
            task.delay(7)
            task.delay(corp_id=7)
            assert messages(redis_client) == sent

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

    @of_each(
        "options",
        [
            {"lock_expiry": 60},
            {"once": {"timeout": 60}},
            {"heimdall": {**QUICK, "unique_timeout": 60}},
        ],
    )
    def test_an_expiry(self, theirs, ours, redis_client, library, options):
        """Counted from the sending, if nobody ends it sooner."""
        theirs(library, options).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        ours(lock_unique_for=60).delay(7)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)

    @of_all
    def test_no_expiry_given(self, theirs, ours, redis_client, library):
        """celery-singleton's never ends; the others' and ours after an hour."""
        theirs(library, library.drops).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(library.expiry)
        ours().delay(7)
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)

    @of(CELERY_SINGLETON)
    def test_settings_for_all_tasks_of_singleton(self, app, theirs, ours, redis_client, library):
        """The app's defaults for a duplicate, the expiry and the names."""
        app.conf.singleton_raise_on_duplicate = True
        app.conf.singleton_lock_expiry = 60
        app.conf.singleton_key_prefix = "shop-theirs:"
        app.conf.dislock_unique_for = 60
        app.conf.dislock_on_duplicate = "raise"
        app.conf.dislock_prefix = "shop-ours"
        for task, names in (
            (theirs(library, {}), "shop-theirs:*"),
            (ours(), "shop-ours:*:unique"),
        ):
            task.delay(7)
            assert expiry_of(redis_client, redis_client.keys(names)) == about(60)
            with pytest.raises(Exception, match=r"duplicate|is there already"):
                task.delay(7)

    @of(CELERY_SINGLETON)
    def test_the_url_of_the_locks(self, app, theirs, ours, redis_url, library):
        """Both take the broker if nothing is set, and may use another database."""
        url = database(redis_url, 1)
        app.conf.singleton_backend_url = app.conf.dislock_url = url
        with redis.Redis.from_url(url, decode_responses=True) as other:
            theirs(library, {}).delay(7)
            ours().delay(7)
            assert len(locks_of(other, library)) == len(reservations(other)) == 1

    @of(CELERY_SINGLETON)
    def test_options_of_the_connections(self, app, theirs, ours, redis_client, library):
        """Both pass them to redis-py; names of clients, for example."""
        app.conf.singleton_backend_kwargs = {"client_name": "theirs"}
        app.conf.dislock_transport_options = {"client_name": "ours"}
        theirs(library, {}).delay(7)
        ours().delay(7)
        assert {"theirs", "ours"} <= {client["name"] for client in redis_client.client_list()}

    @of(CELERY_SINGLETON)
    def test_clear_locks_leaves_ours(self, app, theirs, ours, redis_client, library):
        """It ends what celery-singleton left behind, and may be called when ours are in use."""
        theirs(library, {}).delay(7)
        ours().delay(7)
        pytest.importorskip("celery_singleton").clear_locks(app)
        assert locks_of(redis_client, library) == []
        assert len(reservations(redis_client)) == 1

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ({"unique_on": ["corp_id"]}, "lock_key"),
            ({"unique_on": None}, "lock_key"),
            ({"raise_on_duplicate": True}, "lock_on_duplicate='raise'"),
            ({"lock_expiry": 60}, "lock_unique_for"),
            ({"simulate": True}, "dislock_enabled=False"),
            ({"once": {"keys": ["corp_id"]}}, "lock_key"),
            ({"once": {"graceful": True}}, "lock_on_duplicate"),
            ({"once": {"timeout": 60}}, "lock_unique_for"),
            ({"once": {"unlock_before_run": True}}, "lock_unique_until"),
            ({"heimdall": {"unique": True}}, "lock_unique_until"),
            ({"heimdall": {"times": 2, "per": 60}}, "no limit of tasks per time"),
        ],
        ids=str,
    )
    def test_an_option_that_was_left_is_refused(self, app, option, told):
        """The error names the option of ours."""
        assert told in refused(app, **option)

    @of(CELERY_ONCE)
    def test_an_option_of_one_call(self, theirs, ours, redis_client, library):
        """There a call has its own expiry; here the task decides, and `once` does nothing."""
        theirs(library, {}).apply_async((7,), once={"timeout": 60})
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        task = ours(lock_on_duplicate="raise")
        task.apply_async((7,), once={"timeout": 60})
        assert expiry_of(redis_client, reservations(redis_client)) == about(HOUR)
        with pytest.raises(DuplicateTaskError):
            task.apply_async((7,), once={"graceful": True})

    @of(CELERY_ONCE)
    def test_the_setting_once(self, app, theirs, ours, redis_client, library):
        """Its `default_timeout` is `dislock_unique_for`."""
        app.conf.ONCE["settings"]["default_timeout"] = 60
        app.conf.dislock_unique_for = 60
        theirs(library, {}).delay(7)
        ours().delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)

    @of(CELERY_SINGLETON, CELERY_ONCE)
    def test_one_key_is_freed_by_hand(self, theirs, ours, redis_client, library):
        """The next call is sent."""
        task, free = (
            theirs(library, library.drops),
            {
                CELERY_SINGLETON: lambda task: task.release_lock(task_args=[7]),
                CELERY_ONCE: lambda task: task.once_backend.clear_lock(task.get_key((7,))),
            }[library],
        )
        task.delay(7)
        free(task)
        task.delay(7)
        task = ours(lock_key="export:<corp_id>")
        task.delay(7)
        task.lock_for(7).free()
        task.delay(7)
        assert messages(redis_client) == 4

    @of(CELERY_HEIMDALL)
    def test_once_per_interval(self, theirs, ours, redis_client, library):
        """The key is taken for its whole time, also if the task has ended."""
        waits = {**QUICK, "unique_timeout": 60, "unique_wait_for_expiry": True}
        task = theirs(library, {"heimdall": waits})
        task.delay(7)
        task.after_return("SUCCESS", 7, "id", [7], {}, None)
        assert task.delay(7).id
        ours(lock_unique_until="expiry", lock_unique_for=60).delay(7)
        assert expiry_of(redis_client, locks_of(redis_client, library)) == about(60)
        assert expiry_of(redis_client, reservations(redis_client)) == about(60)
        assert messages(redis_client) == 2

    @of(CELERY_HEIMDALL)
    def test_a_duplicate_waits_for_no_lock(self, theirs, ours, monkeypatch, library):
        """celery-heimdall asks again for a second; ours asks once for each call."""
        asked = []

        def counting(cls: Any, name: str) -> None:
            ask = getattr(cls, name)

            def count(*args: Any, **kwargs: Any) -> Any:
                asked.append(name)
                return ask(*args, **kwargs)

            monkeypatch.setattr(cls, name, count)

        counting(Reservations, "reserve")
        counting(RedisLock, "do_acquire")
        heimdall = {"unique": True, "unique_lock_timeout": 0.5}
        for task in (theirs(library, {"heimdall": heimdall}), ours()):
            for _ in range(2):
                task.delay(7)
        assert asked.count("do_acquire") > 2
        assert asked.count("reserve") == 2
