"""Beats over each scheduler, of which the leader is killed: what is sent, and what is kept."""

import shelve
from collections import Counter
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from celery.schedules import crontab

from celery_dislock import beat
from celery_dislock.exceptions import StoreError
from tests.integration.beats import STEP, TIMEOUT, Killed, World, broker_away
from tests.integration.schedulers import KINDS, schedules_in

TAKEOVERS = 30
EVERY = 2.0  # seconds, of an entry that is due more often than a takeover takes
SELDOM = 4 * TIMEOUT  # seconds, of one that is not
SLACK = 3 * STEP + 0.02  # seconds: rounds of the loops
HOUR = 3600


@pytest.fixture(autouse=True)
def _nobody_blocks(monkeypatch):
    """A beat that waits in line asks once in each round."""
    monkeypatch.setattr(beat, "WAIT_MOST", 0.0)


@pytest.fixture(params=KINDS)
def kept(request, tmp_path):
    """Where the beats keep their schedule."""
    with schedules_in(request.param, tmp_path) as kept:
        yield kept


@pytest.fixture
def table(tmp_path):
    """The tables of django-celery-beat."""
    with schedules_in("django-celery-beat", tmp_path) as table:
        yield table


@pytest.fixture
def redbeat(tmp_path):
    """RedBeat's Redis."""
    with schedules_in("RedBeat", tmp_path) as redbeat:
        yield redbeat


def end_at_random(world, one):
    """Stop a beat, kill it at one of its next commands and messages, or halt it there a while."""
    if world.rng.random() < 0.3:
        one.stop()
        return
    left = 1 + world.rng.randrange(40)

    def around(_when):
        nonlocal left
        left -= 1
        if left == 0:
            if world.rng.random() < 0.5:
                one.alive = False
                raise Killed
            one.halted = True
            world.run(world.rng.uniform(0, 3 * TIMEOUT), but=one)

    one.around = around
    while left > 0:
        world.run(STEP)


@pytest.mark.extra
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_takeovers_at_random(kept, seed):
    """No tick has two ids, none is missing, and nothing is silent for longer than a timeout."""
    world = World({"often": EVERY, "minutely": crontab()}, beats=3, seed=seed, kept=kept)
    world.run(5)
    for _ in range(TAKEOVERS):
        end_at_random(world, world.leader)
        ended = [one.made for one in world.beats if not one.alive and world.rng.random() < 0.5]
        world.beats = [one for one in world.beats if one.alive]
        world.beats += [world.start(made=made) for made in ended]
        world.beats += [world.start() for _ in range(3 - len(world.beats))]
        world.run(TIMEOUT + 2 * STEP)
    world.run(61)

    often, minutely = world.ticks("often"), world.ticks("minutely")
    gaps = [later.tick - sooner.tick for sooner, later in pairwise(often)]
    assert min(gaps) >= EVERY - SLACK
    assert max(gaps) <= EVERY + TIMEOUT + SLACK
    minutes = [int(one.tick // 60) for one in minutely]
    assert minutes == list(range(minutes[0], minutes[-1] + 1))
    late = [one.at - one.tick for one in often + minutely if not one.by.halted]
    assert max(late) <= TIMEOUT + SLACK
    for one in Counter(one.id for one in world.sent).values():
        assert one <= 2


def dies_as_it_sends(one, when):
    """Let a beat be killed at its next message, before it goes out or after."""
    send = one.sends

    def sends(*message):
        if when == "after":
            send(*message)
        one.alive = False
        raise Killed

    one.sends = sends


def make_one_off(row, of, when):
    """Let a row be sent once: after its interval, or at a time."""
    from django_celery_beat.models import ClockedSchedule

    row.one_off = True
    if of == "clocked":
        at = datetime.fromtimestamp(when, timezone.utc)
        row.interval, row.clocked = None, ClockedSchedule.objects.create(clocked_time=at)
    row.save()


def kill_as_it_sends(world, when):
    """Kill the leader at its next message; those that stand by wait for its lease."""
    leader = world.leader
    dies_as_it_sends(leader, when)
    while leader.alive:
        world.run(STEP)
    world.beats.remove(leader)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_beat_killed_as_it_sends(kept, when):
    """Its tick goes out under one id, later ticks have others, and each is counted once."""
    world = World({"seldom": SELDOM}, kept=kept)
    world.run(STEP)
    for _ in range(3):
        world.beats.append(world.start())
        kill_as_it_sends(world, when)
        world.run(TIMEOUT + 3 * STEP)
    twice = [one for one in Counter(one.id for one in world.sent).values() if one > 1]
    assert twice == ([2] * 3 if when == "after" else [])
    ticks = [one.tick for one in world.ticks("seldom")]
    gaps = [later - sooner for sooner, later in pairwise(ticks)]
    assert gaps == pytest.approx([SELDOM] * 2, abs=2 * STEP + (when == "before") * TIMEOUT)
    if hasattr(kept, "row"):
        assert kept.row("seldom").total_run_count == len(ticks)


def test_a_tick_that_the_broker_did_not_take(kept):
    """The leader sends it when the broker is back, whatever the schedule shows by then."""
    world = World({"hourly": HOUR, "often": EVERY}, beats=1, kept=kept)
    world.run(STEP)
    world.advance(HOUR - STEP)
    world.beats[0].watchdog.tick()
    with broker_away(*world.beats):
        world.run(5.5 * EVERY)
    world.run(2 * EVERY)
    assert Counter(one.entry for one in world.sent)["hourly"] == 1
    often = world.ticks("often")
    assert len(often) == sum(one.entry == "often" for one in world.sent)
    assert min(later.tick - sooner.tick for sooner, later in pairwise(often)) >= EVERY - SLACK


@pytest.mark.parametrize("of", ["interval", "clocked"])
def test_a_one_off_entry_that_the_broker_did_not_take(table, of):
    """It is disabled at once, and goes out all the same; not if it was deleted."""
    world = World({"once": EVERY, "deleted": EVERY}, beats=1, kept=table)
    for name in ("once", "deleted"):
        make_one_off(table.row(name), of, world.now + EVERY)
    world.run(STEP)
    with broker_away(*world.beats):
        world.run(2 * EVERY)
        assert not table.row("once").enabled
        table.row("deleted").delete()
    world.run(2 * EVERY)
    assert [one.entry for one in world.sent] == ["once"]
    row = table.row("once")
    assert (row.enabled, row.total_run_count) == (False, 0)


def test_an_entry_of_redbeat_that_was_disabled_while_the_broker_was_away(redbeat):
    """It is not sent any more."""
    world = World({"hourly": HOUR}, beats=1, kept=redbeat)
    world.run(STEP)
    world.advance(HOUR - STEP)
    world.beats[0].watchdog.tick()
    with broker_away(*world.beats):
        world.run(EVERY)
    app, entries = world.beats[0].app, redbeat.scheduler.Entry
    entry = entries.from_key(entries.generate_key(app, "hourly"), app=app)
    entry.enabled = False
    entry.save()
    world.run(2 * EVERY)
    assert not world.sent


def test_an_outage_of_the_lock_server_repeats_nothing(kept):
    """What was sent since the schedule was read is known, though the leader stood by."""
    world = World({"often": EVERY, "seldom": 5 * EVERY}, kept=kept)
    world.run(13)
    wire = world.leader.scheduler._lock.store.lock_server

    def run(*_command):
        raise StoreError("redis://nowhere", "away")

    wire.run = run
    world.run(TIMEOUT / 2)
    del wire.run
    world.run(10)
    assert len({one.id for one in world.sent}) == len(world.sent)
    for name, every in (("often", EVERY), ("seldom", 5 * EVERY)):
        ticks = [one.tick for one in world.ticks(name)]
        assert min(later - sooner for sooner, later in pairwise(ticks)) >= every - STEP


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("of", ["interval", "clocked"])
def test_one_off_entries_of_a_table_go_out_once(table, when, of):
    """The leader that sent it was killed before that was in the table; then it is disabled."""
    world = World({"once": EVERY}, kept=table)
    make_one_off(table.row("once"), of, world.now + EVERY)
    world.run(STEP)
    kill_as_it_sends(world, when)
    world.beats.append(world.start())
    world.run(TIMEOUT + 5 * EVERY)
    assert len(world.sent) == 1 + (when == "after")
    assert len({one.id for one in world.sent}) == 1
    assert not table.row("once").enabled


def interval(seconds):
    from django_celery_beat.models import IntervalSchedule

    return IntervalSchedule.objects.get_or_create(every=seconds, period="seconds")[0]


def edit(table, **changes):
    """Save a row, as Django's admin does."""
    row = table.row("often")
    for name, value in changes.items():
        setattr(row, name, value)
    row.full_clean()
    row.save()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_entry_edited_in_a_takeover(table, when):
    """The tick that may not have gone out is sent again; from then on the edit counts."""
    world = World({"often": EVERY}, kept=table)
    world.run(7)
    kill_as_it_sends(world, when)
    edit(table, interval=interval(10), description="in the admin")
    sent = len(world.sent)
    world.run(TIMEOUT + 20)
    again, *later = world.sent[sent:]
    assert (again.id in {one.id for one in world.sent[:sent]}) is (when == "after")
    assert [round(one.tick - again.tick) for one in later] == [10, 20]
    assert table.row("often").total_run_count == len(world.ticks("often"))


@pytest.mark.parametrize("how", ["disabled", "deleted", "expired", "not started"])
def test_an_entry_switched_off_in_a_takeover(table, how):
    """Nothing of it goes out any more, and the beat leads on."""
    world = World({"often": EVERY, "other": EVERY}, kept=table)
    world.run(7)
    world.leader.alive = False
    del world.beats[[one.alive for one in world.beats].index(False)]
    now = datetime.fromtimestamp(world.now, timezone.utc)
    if how == "deleted":
        table.row("often").delete()
    else:
        edit(
            table,
            **{
                "disabled": {"enabled": False},
                "expired": {"expires": now - timedelta(seconds=1)},
                "not started": {"start_time": now + timedelta(hours=1)},
            }[how],
        )
    sent = len(world.sent)
    world.run(TIMEOUT + 5 * EVERY)
    assert {one.entry for one in world.sent[sent:]} == {"other"}


@pytest.mark.parametrize("takes_over", [True, False])
def test_an_entry_deleted_and_made_again(table, takes_over):
    """It begins at its start time, whoever has sent the one of this name before."""
    world = World({"often": 20.0}, kept=table)
    world.run(45)
    assert len(world.sent) == 2
    table.row("often").delete()
    del world.schedule["often"]
    if takes_over:
        world.leader.stop()
        world.beats = [one for one in world.beats if one.alive]
    world.run(5)
    start = world.now + 5
    begins = datetime.fromtimestamp(start, timezone.utc)
    kind = interval(20)
    table.scheduler.Model.objects.create(
        name="often", task="often", interval=kind, start_time=begins
    )
    world.run(30)
    assert [round(one.tick - start) for one in world.sent[2:]] == [0, 20]


def test_an_entry_switched_on_again_waits_for_its_time(table):
    """Its record is older than the row, as after a time with a beat without --dislock."""
    world = World({"often": 60.0}, kept=table)
    world.run(61)
    edit(table, enabled=False)
    world.leader.stop()
    world.advance(HOUR)
    edit(table, enabled=True)
    sent = len(world.sent)
    world.beats = [world.start()]
    world.run(50)
    assert len(world.sent) == sent == 1
    world.run(20)
    assert len(world.sent) == 2


@pytest.mark.parametrize("leads_again", [False, True])
def test_a_leader_that_returns_saves_nothing_old(table, leads_again):
    """It was halted as it sent; its table has the runs of the beat that took over."""
    world = World({"often": EVERY}, kept=table)
    world.run(7)
    halted, send = world.leader, world.leader.sends

    def sends(*message):
        halted.sends = send
        send(*message)
        world.run(TIMEOUT + 3 * EVERY, but=halted)

    halted.sends = sends
    world.run(TIMEOUT)
    assert not halted.leads
    if leads_again:
        world.leader.stop()
        world.beats = [halted]
        world.run(3 * EVERY)
        assert halted.leads
    saved = table.row("often")
    assert saved.total_run_count == len(world.ticks("often"))
    assert saved.last_run_at.timestamp() == pytest.approx(world.ticks("often")[-1].tick, abs=0.01)


def test_a_beat_that_cannot_read_its_table_lets_another_lead(table, caplog):
    """It says what is wrong, stands by, and does not exit."""
    from django.db import DatabaseError

    world = World({"often": EVERY}, beats=3, kept=table)
    world.run(7)
    wrong = next(one for one in world.beats if not one.leads)

    def read():
        raise DatabaseError("no such table")

    wrong.scheduler.all_as_schedule = read
    world.leader.stop()
    world.beats.sort(key=lambda one: one is not wrong)
    world.run(TIMEOUT)
    assert world.leader is not wrong
    assert caplog.text.count("cannot take over the schedule: DatabaseError: no such table") == 1


def test_a_file_that_is_newer_than_the_record_counts(tmp_path):
    """A beat without --dislock has sent since: what it has sent does not go out again."""
    with schedules_in("file", tmp_path) as file:
        world = World({"often": 60.0}, beats=1, kept=file)
    world.run(61)
    (before,) = world.beats
    before.stop()
    world.advance(HOUR)
    with shelve.open(before.made["schedule_filename"], writeback=True) as store:
        store["entries"]["often"].last_run_at = before.now()
    world.advance(10)
    world.beats = [world.start(made=before.made)]
    world.run(49)
    assert len(world.sent) == 1
    world.run(2)
    assert len(world.sent) == 2


@pytest.mark.parametrize("removed", [True, False])
def test_an_entry_that_redbeat_hides(redbeat, removed):
    """Killed after RedBeat has noted the run: the tick is sent again though it is not due."""
    world = World({"often": HOUR}, kept=redbeat)
    world.run(STEP)
    world.advance(HOUR - 2 * TIMEOUT)
    world.run(TIMEOUT + STEP)
    kill_as_it_sends(world, "before")
    assert not world.sent
    if removed:
        entry, app = redbeat.scheduler.Entry, world.beats[0].app
        entry.from_key(entry.generate_key(app, "often"), app=app).delete()
    world.run(TIMEOUT + 1)
    assert len(world.sent) == (not removed)


def test_an_entry_rescheduled_in_redbeat(redbeat):
    """It is sent at once, though another beat has sent it later than it is now said to have run."""
    world = World({"often": 60.0}, kept=redbeat)
    world.run(61)
    world.leader.stop()
    world.beats = [one for one in world.beats if one.alive]
    world.run(STEP)
    app, entries = world.beats[0].app, redbeat.scheduler.Entry
    entry = entries.from_key(entries.generate_key(app, "often"), app=app)
    entry.reschedule(entry.last_run_at - timedelta(hours=1))
    world.run(STEP)
    assert len(world.sent) == len({one.id for one in world.sent}) == 2


@pytest.mark.extra
@pytest.mark.parametrize(
    ("offset", "zone"),
    [(-STEP, "UTC"), (0, "Europe/Berlin"), (STEP, "Europe/Berlin")],
    ids=["before", "at", "after"],
)
def test_a_kill_at_the_minute_of_a_crontab(kept, offset, zone):
    """The minute goes out once, also in a time zone whose clocks are set an hour ahead then."""
    summer = datetime(2024, 3, 31, 1, tzinfo=timezone.utc).timestamp()
    world = World({"minutely": crontab()}, kept=kept, timezone=zone, enable_utc=zone == "UTC")
    world.advance(summer - 150 - world.now)
    world.run(60)
    world.run(summer - world.now + offset)
    world.leader.alive = False
    world.beats = [one for one in world.beats if one.alive]
    world.beats.append(world.start())
    world.run(130)
    minutes = [round(one.at - summer) // 60 for one in world.ticks("minutely")]
    assert minutes[-4:] == [-1, 0, 1, 2]
    assert len({one.id for one in world.sent}) == len(world.sent)
