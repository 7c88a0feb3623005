"""A task that sends itself again for another key: its reservation and its lock go with it."""

import pytest

from celery_dislock.scripts import UNRESERVE
from tests.declaring import declare, does_nothing
from tests.driven import held, reservation
from tests.unit.deliveries import arrived, deliver, lose_process

UNTIL = pytest.mark.parametrize("until", ["start", "end", "expiry"])
WAYS = ("retry", "autoretry", "before_start", "replaced before", "replace", "itself")
BEFORE = {"before_start", "replaced before"}  # ways of one that no guard runs


def page(app, how="retry", *, to=2, **options):
    """Declare a task that is sent again by its run for page 1, for another page."""

    def again(self, n):
        if n != 1:
            return
        if how in {"retry", "before_start"}:
            raise self.retry(args=(to,), countdown=100)
        if how in {"replace", "replaced before"}:
            self.replace(self.si(to))
        if how == "itself":
            self.apply_async((to,), task_id=self.request.id)
        if how == "autoretry":
            self.request.args = (to,)  # as retry() reads them
            raise KeyError

    def body(self, n):
        if how not in BEFORE:
            again(self, n)

    begins = {"before_start": lambda self, _id, args, _kwargs: again(self, *args)}
    return declare(
        app,
        body,
        **{
            "lock_key": "page:<n>",
            "lock_unique_until": "end",
            "autoretry_for": (KeyError,),
            **(begins if how in BEFORE else {}),
            **options,
        },
    )


def state_of(task, *args):
    """Return whose the key is, and what that task does; None: it is free."""
    found = reservation(task, *args)
    return found and (found.id, found.state)


def first(task, broker, **options):
    """Send and run the task for page 1; return its second message."""
    task.apply_async((1,), task_id="x", **options)
    deliver(task, "x", 1, headers=broker.last.headers)
    assert broker.ids == ["x", "x"]
    return broker.last


@UNTIL
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"lock_limit": None}, {"lock_key": ["page:<n>", "of:<n>"]}], ids=str
)
def test_the_key_of_its_next_message_takes_the_place_of_its_own(app, broker, until, how, options):
    """The first key is free when the second is reserved, and that when the task has ended."""
    task = page(app, how, lock_unique_until=until, **options)
    again = first(task, broker)
    left = ("x", "ended") if until == "expiry" else None
    assert (state_of(task, 1), state_of(task, 2)) == (left, ("x", "waiting"))
    deliver(task, "x", 2, headers=again.headers, retries=1)
    assert (state_of(task, 1), state_of(task, 2)) == (left, left)
    assert task.delay(1).duplicate is (until == "expiry")


@UNTIL
@pytest.mark.parametrize("how", WAYS)
def test_its_own_key_goes_with_its_next_message(app, broker, until, how):
    """Nobody else may send a message of that key before this one has begun, or ended."""
    task = page(app, how, lock_key="page", lock_unique_until=until)
    again = first(task, broker)
    assert state_of(task, 1) == ("x", "waiting")
    deliver(task, "x", 2, headers=again.headers, retries=1)
    assert state_of(task, 1) == (("x", "ended") if until == "expiry" else None)


@pytest.mark.parametrize("options", [{}, {"lock_key": False}], ids=["guarded", "no guard"])
def test_another_task_under_its_id_and_key_keeps_the_key(app, broker, options):
    """The end of the first does not end the reservation of the second."""
    other = declare(app, does_nothing, name="shop.other", lock_key="page", lock_unique_until="end")
    sends = page(app, "nothing", lock_key="page", lock_unique_until="end")
    sends.apply_async((2,), task_id="x")
    headers = broker.last.headers
    app.tasks.pop(sends.name)
    task = declare(
        app,
        lambda **_: other.apply_async(task_id="x"),
        **{"lock_key": "page", "lock_unique_until": "end", **options},
    )
    deliver(task, "x", headers=headers)
    assert (broker.ids, state_of(other)) == (["x", "x"], ("x", "waiting"))
    deliver(other, "x", headers=broker.last.headers)
    assert state_of(other) is None


@UNTIL
@pytest.mark.parametrize("key", ["page", "other"])
def test_a_process_that_dies_after_it_has_sent_another_under_its_id(app, broker, until, key):
    """The main process knows of no second message: it frees their key, and leaves another alone."""
    options = {"lock_unique_until": until}
    other = declare(app, does_nothing, name="shop.other", lock_key=key, **options)

    def body():
        other.apply_async(task_id="x")
        lose_process(request)
        seen.append((state_of(task), state_of(other)))

    seen, task = [], declare(app, body, lock_key="page", **options)
    task.apply_async(task_id="x")
    request = arrived(task, "x", **broker.last.headers)
    deliver(task, "x", headers=broker.last.headers)
    first = ("x", "ended") if until == "expiry" else None
    assert seen == [(first, first if key == "page" else ("x", "waiting"))]
    assert deliver(other, "x", headers=broker.last.headers).info is None  # it runs all the same
    assert state_of(other) == first


@pytest.mark.parametrize("how", WAYS)
def test_a_key_that_is_another_ones_leaves_it_the_first(app, broker, how):
    """It is sent all the same; its first key is reserved until it has ended, and no other."""
    task = page(app, how)
    task.apply_async((2,), task_id="y")
    broker.sent.clear()
    again = first(task, broker)
    assert (state_of(task, 1), state_of(task, 2)) == (("x", "waiting"), ("y", "waiting"))
    assert reservation(task, 1).remaining > 3500
    deliver(task, "x", 2, headers=again.headers, retries=1)
    assert (state_of(task, 1), state_of(task, 2)) == (None, ("y", "waiting"))


def test_with_start_a_task_that_has_begun_does_not_reserve_its_first_key_again(app, broker):
    """A message for that would be dropped, and nobody would do its work."""
    task = page(app, lock_unique_until="start")
    task.apply_async((2,), task_id="y")
    broker.sent.clear()
    first(task, broker)
    assert (state_of(task, 1), state_of(task, 2)) == (None, ("y", "waiting"))


@UNTIL
def test_a_message_that_cannot_be_sent_leaves_no_key(app, broker, until):
    """The broker is away: the task is rejected, and its keys are free."""
    task = page(app, lock_unique_until=until)
    task.apply_async((1,), task_id="x")
    broker.times_away = 1
    deliver(task, "x", 1, headers=broker.last.headers)
    left = ("x", "ended") if until == "expiry" else None
    assert (state_of(task, 1), state_of(task, 2)) == (left, None)


def test_a_lock_server_that_goes_away_meanwhile_costs_no_message(app, lock_server, broker):
    """The first key goes with the retry, which ends it."""
    task = page(app)
    task.apply_async((1,), task_id="x")
    away = []

    def body(self, n):
        lock_server.away = n == 1
        away.append(n)
        if n == 1:
            raise self.retry(args=(2,))

    app.tasks.pop(task.name)
    task = declare(app, body, lock_key="page:<n>", lock_unique_until="end")
    deliver(task, "x", 1, headers=broker.last.headers)
    lock_server.away = False
    lock_server.advance(6)
    assert (away, state_of(task, 1)) == ([1], ("x", "running"))
    deliver(task, "x", 2, headers=broker.last.headers, retries=1)
    assert state_of(task, 1) is None


def test_a_process_that_dies_between_two_keys_leaves_the_first_to_its_expiry(
    app, lock_server, broker
):
    """As one that dies in its body.  The second key is that of the message that was sent."""
    task = page(app)
    lock_server.fail_once(UNRESERVE)
    first(task, broker)
    assert (state_of(task, 1), state_of(task, 2)) == (("x", "running"), ("x", "waiting"))
    lock_server.advance(61)
    assert (state_of(task, 1), state_of(task, 2)) == (None, ("x", "waiting"))


@pytest.mark.parametrize("unique", [False, True])
def test_what_another_task_replaces_leaves_its_key_to_that_or_free(app, broker, unique):
    """One task id has one reservation: that of the message which was sent last."""
    options = {"lock_unique_until": "end"} if unique else {}
    other = declare(app, does_nothing, name="shop.other", lock_key="other", **options)
    task = declare(app, lambda self: self.replace(other.si()), lock_unique_until="end")
    sent = task.delay()
    deliver(task, sent.id, headers=broker.last.headers)
    assert (state_of(task), state_of(other)) == (None, (sent.id, "waiting") if unique else None)


@pytest.mark.parametrize("until", ["start", "end"])
@pytest.mark.parametrize("how", ["retry", "replace"])
def test_what_is_sent_again_for_its_own_key_is_no_newer(app, broker, until, how):
    """A newer edition was sent meanwhile: the retry or replacement of the older one ends."""

    def body(self, n=0):
        if n or self.request.retries:
            return "ran"
        task.apply_async(task_id="newer")
        if how == "replace":
            self.replace(self.si(1))
        raise self.retry(countdown=0)

    task = declare(app, body, lock_unique_until=until, lock_on_duplicate="replace")
    task.apply_async(task_id="older")
    deliver(task, "older", headers=broker.last.headers)
    assert broker.ids == ["older", "newer", "older"]
    deliver(task, "older", headers=broker.last.headers, retries=1)
    assert app.AsyncResult("older").state == "REVOKED"


# lock_hold_on_retry


def test_a_lock_that_the_retry_does_not_take_is_not_held_for_it(app, lock_server, broker):
    """Nobody would take it over."""
    task = page(app, lock_hold_on_retry=True)
    again = first(task, broker)
    assert (lock_server.locks(), "held" in again.notes) == ([], False)


# Another release names the key otherwise


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("retries_again", [False, True])
def test_a_key_that_was_renamed_while_its_retry_was_on_its_way(
    app, lock_server, broker, hold, retries_again
):
    """The old key is reserved until the retry has ended, and its lock until that has begun."""

    def retry(self, n):
        raise self.retry(countdown=100)

    old = declare(app, retry, lock_key="old:<n>", lock_unique_until="end", lock_hold_on_retry=hold)
    again = first(old, broker)
    assert lock_server.locks() == ["old:1"] * hold
    broker.sent.clear()

    def body(self, n):
        seen.append(lock_server.locks())
        if retries_again and len(seen) == 1:
            retry(self, n)

    seen = []
    app.tasks.pop(old.name)
    new = declare(app, body, lock_key="new:<n>", lock_unique_until="end", lock_hold_on_retry=hold)
    lock_server.advance(100)
    deliver(new, "x", 1, headers=again.headers, retries=1)
    assert seen == [["new:1"]]
    before = state_of(old, 1)
    assert (before, state_of(new, 1)) == (None, ("x", "waiting") if retries_again else None)
    if retries_again:
        deliver(new, "x", 1, headers=broker.last.headers, retries=2)
        assert (seen[1:], state_of(new, 1)) == ([["new:1"]], None)
    assert lock_server.locks() == []


def test_of_several_leases_those_of_renamed_keys_are_released(app, lock_server, broker):
    """The retry takes over what it locks as well, and releases the others."""

    def body(self):
        if not self.request.retries:
            raise self.retry(countdown=10)
        with held(app, "a", "7"):
            return lock_server.locks()

    declared = declare(app, body, lock_key=["a", "b"], lock_hold_on_retry=True)
    deliver(declared)
    assert lock_server.locks() == ["a", "b"]
    app.tasks.pop(declared.name)
    declared = declare(app, body, lock_key=["b", "c"], lock_hold_on_retry=True)
    assert deliver(declared, headers=broker.last.headers, retries=1).retval == ["a", "b", "c"]
    assert lock_server.locks() == []
