"""One of several beats sends: each step, with clocks and a server that the test drives."""

import inspect
import logging
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, Service
from celery.schedules import crontab

from celery_dislock import beat
from celery_dislock.exceptions import StoreError
from celery_dislock.plugin import beat_command
from celery_dislock.scripts import OVERRIDE
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.view import is_beat
from tests.integration.beats import STEP, TIMEOUT, Killed, World, broker_away, records
from tests.integration.schedulers import schedules_in

HOUR = 3600


@pytest.fixture(autouse=True)
def _nobody_blocks(monkeypatch):
    """A beat that waits in line asks once in each round."""
    monkeypatch.setattr(beat, "WAIT_MOST", 0.0)


def fail_at(one, when, number=1, error=Killed):
    """Let a beat die, or get an error, before or after one of its next commands and messages."""
    left = number

    def around(now):
        nonlocal left
        left -= now == when
        if left == 0 and now == when:
            one.alive = error is not Killed
            raise error if error is Killed else error("redis://nowhere", "away")

    one.around = around


def kill_leader(world):
    """Let the beat that leads die."""
    world.leader.alive = False
    world.beats = [one for one in world.beats if one.alive]


def away(_when):
    """Answer nothing."""
    raise StoreError("redis://nowhere", "away")


@contextmanager
def notes_unanswered(one):
    """Let a beat get no answer from when it has sent its next message."""

    def send(*message):
        sends(*message)
        one.around = away

    sends, one.sends = one.sends, send
    yield
    one.sends, one.around = sends, lambda _when: None


def limit(world, number):
    """Pause the lock with "0", resume it with an empty text."""
    world.server.run(OVERRIDE, ["dislock:{beat}"], "", 0, "", "limit", number)


def hold_back(world, seconds):
    """Pause the lock for a time, which an operator and a body may do; 0: resume it."""
    world.server.run(
        OVERRIDE, ["dislock:{beat}"], "", seconds * 1000, "", "back", "-" if seconds else ""
    )


def run_until_due(world, every=2.0):
    """Let one message go out, and most of the time until the next pass."""
    world.run(every)
    sent = len(world.sent)
    while len(world.sent) == sent:
        world.run(STEP)
    world.run(every - 2 * STEP)


def go_to(world, when):
    """Let the clock jump to a time, at which the beats go round next."""
    world.advance(when - STEP - world.now)
    for one in world.beats:
        one.watchdog.tick()


def next_midnight(world):
    return (world.now // (24 * HOUR) + 1) * 24 * HOUR


def test_one_of_two_sends_and_the_other_follows_a_clean_stop():
    """It waits in line, leads in its next round then, and keeps the rhythm; no id comes twice."""
    world = World({"often": 2.0})
    world.run(21)
    stopped = world.leader
    assert [one.by for one in world.sent] == [stopped] * 10
    stopped.stop()
    world.beats.remove(stopped)
    world.run(STEP)
    assert world.leader is not stopped
    world.run(10)
    ticks = [one.tick for one in world.ticks("often")]
    assert max(b - a for a, b in pairwise(ticks)) < 2 + 2 * STEP
    assert len({one.id for one in world.sent}) == len(world.sent)


@pytest.mark.parametrize(
    ("when", "number", "messages"),
    [("after", 1, 1), ("before", 2, 1), ("after", 2, 2), ("before", 3, 2)],
    ids=["claimed", "about to send", "sent", "about to note"],
)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_tick_of_a_killed_beat_goes_out_under_one_id(when, number, messages, kind, tmp_path):
    """Killed between claim and note, nobody knows whether it was sent: it is sent again, once."""
    with schedules_in(kind, tmp_path) as kept:
        world = World({"seldom": 8.0}, kept=kept)
    run_until_due(world, 8.0)
    before, killed = len(world.sent), world.leader
    fail_at(killed, when, number)
    world.run(4 * STEP)
    assert not killed.alive
    world.run(TIMEOUT)
    again = world.sent[before:]
    assert len(again) == messages
    assert len({one.id for one in again} | {one.tick for one in again}) == 2
    sent = len(world.sent)
    world.run(32)
    later = world.sent[sent:]
    assert len({one.id for one in world.sent[before:]}) == 1 + len(later) == 5
    assert later[0].tick - again[0].tick == pytest.approx(8.0, abs=STEP)


@pytest.mark.parametrize(("when", "number"), [("after", 1), ("before", 2)])
def test_a_tick_that_is_due_again_takes_the_place_of_one_that_was_not_sent(when, number):
    """The next beat sends what is due by then, and not also what the killed one had claimed."""
    world = World({"often": 2.0})
    run_until_due(world)
    before, killed = len(world.sent), world.leader
    fail_at(killed, when, number)
    world.run(4 * STEP)
    assert not killed.alive
    world.run(TIMEOUT)
    assert len(world.sent) == before + 1
    world.run(2.0)
    assert len({one.id for one in world.sent}) == len(world.sent) == before + 2


def test_a_tick_that_the_broker_did_not_take_goes_out_when_it_does(caplog):
    """The leader sends it itself, once, and the next leader does not send it again."""
    world = World({"hourly": HOUR})
    go_to(world, world.now + HOUR)
    with broker_away(*world.beats):
        world.run(20 * STEP)
    assert not world.sent
    world.run(2 * beat.PAUSE)
    (sent,) = world.sent
    assert sent.tick == pytest.approx(sent.at - 20 * STEP, abs=2 * beat.PAUSE)
    assert caplog.text.count("Beat keeps a message that has not gone out") == 1
    leader = world.leader
    leader.stop()
    world.beats.remove(leader)
    world.run(TIMEOUT)
    assert len(world.sent) == 1
    go_to(world, sent.tick + HOUR)
    world.run(4 * STEP)
    assert [round(one.tick - sent.tick) for one in world.sent] == [0, HOUR]
    assert len({one.id for one in world.sent}) == 2


@pytest.mark.skipif(
    "while rem_secs < 0" in inspect.getsource(crontab.is_due),
    reason="with a deadline, Celery 5.5 looks for minutes at when a crontab was due last",
)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("deadline", "messages"), [(None, 1), (HOUR, 1), (60, 0)])
def test_a_tick_is_not_sent_later_than_celery_would_send_it(deadline, messages, killed):
    """After beat_cron_starting_deadline neither the leader sends it, nor the next one."""
    conf = {"beat_cron_starting_deadline": deadline}
    world = World({"daily": crontab(hour=0, minute=0)}, beats=1, **conf)
    world.run(1)
    midnight = next_midnight(world)
    go_to(world, midnight)
    with broker_away(*world.beats):
        world.run(2 * STEP)
        assert records(world)["daily"].split()[-1] != "-"
        if killed:
            world.leader.alive = False
            world.beats = []
        go_to(world, midnight + 1800)
    world.beats = world.beats or [world.start()]
    world.run(2 * beat.PAUSE)
    assert len(world.sent) == messages
    go_to(world, midnight + 24 * HOUR)
    world.run(2 * STEP)
    assert len({one.id for one in world.sent}) == len(world.sent) == messages + 1


def test_a_message_that_cannot_be_made_is_tried_once(caplog):
    """As with Celery alone: it is not the broker that refuses it."""
    world = World({"hourly": HOUR})
    go_to(world, world.now + HOUR)
    with broker_away(*world.beats, error=TypeError("not JSON serializable")):
        world.run(20 * STEP)
    assert caplog.text.count("Message Error") == 1
    assert "has not gone out" not in caplog.text
    world.run(TIMEOUT)
    assert not world.sent


def test_a_pause_holds_back_what_the_broker_did_not_take():
    """It goes out when the lock is resumed, also from another beat."""
    world = World({"hourly": HOUR})
    go_to(world, world.now + HOUR)
    with broker_away(*world.beats):
        world.run(4 * STEP)
    limit(world, "0")
    world.run(2 * TIMEOUT)
    assert not world.sent
    limit(world, "")
    world.run(TIMEOUT)
    assert len(world.sent) == 1


def test_a_dead_beat_in_line_holds_nobody_up():
    """A leader that is killed soon after one that stood by is followed within the timeout."""
    world = World({"often": 2.0})
    run_until_due(world)
    dead = ("dead@h:1/a.1", TIMEOUT, "{}")
    world.server.store().acquire(["dislock:{beat}"], *dead, place=10 * TIMEOUT)
    kill_leader(world)
    world.run(TIMEOUT + STEP)
    assert world.leader in world.beats


def test_a_place_in_line_ends_soon_after_its_beat():
    """So a clean stop does not hand the lock to a beat that was killed as it stood by."""
    world = World({"often": 2.0}, beats=3)
    run_until_due(world)
    stopped = world.leader
    killed = next(one for one in world.beats if one is not stopped)
    fail_at(killed, "after")
    world.run(1.0 + 2 * STEP)
    assert not killed.alive
    stopped.stop()
    world.beats = [one for one in world.beats if one.alive]
    world.run(STEP)
    assert world.leader in world.beats


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_beat_that_followed_begins_anew_on_an_emptied_server(kind, restarted, tmp_path):
    """It does not know what the others have sent, so it sends nothing that was due before."""
    with schedules_in(kind, tmp_path) as kept:
        world = World({"hourly": HOUR, "daily": crontab(hour=0, minute=0)}, kept=kept)
    world.run(1)
    if restarted:
        first = world.leader
        (follower,) = [one for one in world.beats if one is not first]
        follower.stop()
        world.beats = [first, world.start(made=follower.made)]
    go_to(world, next_midnight(world))
    world.run(1)
    sent = len(world.sent)
    assert {one.entry for one in world.sent} == {"hourly", "daily"}
    kill_leader(world)
    world.server.lose()
    world.run(TIMEOUT)
    world.beats = [*world.beats, world.start()]
    assert world.leader
    assert len(world.sent) == sent
    now = world.now
    go_to(world, now + HOUR)
    world.run(2 * TIMEOUT)
    assert [one.entry for one in world.sent[sent:]] == ["hourly"]


def test_a_leader_goes_on_from_what_it_knows_on_an_emptied_server():
    """It sends what was due while it was away, and nothing twice, if it is the first to lead."""
    world = World({"hourly": HOUR}, beats=1)
    go_to(world, world.now + HOUR)
    world.run(1)
    world.server.lose()
    go_to(world, world.now + HOUR)
    world.run(TIMEOUT)
    assert len({one.id for one in world.sent}) == len(world.sent) == 2


def test_a_new_beat_leads_by_the_times_of_the_server():
    """Each entry has its own, also one that was never sent: it comes when it would have."""
    every = {"a": 7.0, "b": 60.0, "c": 25.0, "never": 600.0}
    world = World(every, beats=1)
    world.run(65)
    last = {name: float(one.split()[1]) / 1e6 for name, one in records(world).items()}
    assert len(set(last.values())) == len(every)
    world.leader.stop()
    world.advance(2.0)
    new = world.start()
    world.beats = [new]
    world.run(STEP)
    known = {name: one.last_run_at.timestamp() for name, one in new.scheduler.schedule.items()}
    assert known == pytest.approx(last, abs=1e-5)
    sent = len(world.sent)
    world.run(600)
    for name, seconds in every.items():
        first = next(one.tick for one in world.sent[sent:] if one.entry == name)
        assert first - last[name] == pytest.approx(seconds, abs=2 * STEP)


@pytest.mark.parametrize("name", [7, ("a", 1), b"\xff", None, "\ud800"], ids=repr)
def test_an_entry_may_be_called_anything(name):
    """Celery takes any key of a dict for a name, also one that is no text that can be sent."""
    world = World({name: 8.0})
    world.run(STEP)
    killed = world.leader
    run_until_due(world, 8.0)
    fail_at(killed, "after", 2)
    world.run(TIMEOUT + 4 * STEP)
    assert not killed.alive
    assert sorted(Counter(one.id for one in world.sent).values())[-2:] == [1, 2]


@pytest.mark.parametrize("catches_up", [True, False])
def test_what_became_due_meanwhile_is_sent_once_or_not_at_all(catches_up):
    """As dislock_beat_catch_up says; later ticks are not concerned."""
    world = World({"daily": crontab(hour=0, minute=0)}, dislock_beat_catch_up=catches_up)
    midnight = next_midnight(world)
    world.run(1)
    world.advance(midnight - world.now - 1)
    for one in world.beats:
        one.go_round()
    world.run(STEP)
    kill_leader(world)
    world.run(TIMEOUT + 1)
    assert len(world.sent) == catches_up
    world.advance(24 * HOUR - 60)
    world.run(60)
    assert len(world.sent) == catches_up + 1


def test_a_halted_leader_sends_nothing_more():
    """Its claim is refused, even if it has looked at its lease just before."""
    world = World({"often": 2.0})
    run_until_due(world)
    halted = world.leader
    begun = False

    def around(when):
        nonlocal begun
        if when == "before" and not begun:
            begun = True
            world.run(3 * TIMEOUT, but=halted)

    halted.around = around
    halted.go_round()
    while not begun:
        world.run(STEP)
    assert not halted.leads
    ids = [one.id for one in world.sent]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("where", ["connecting", "sending"])
def test_another_beat_leads_if_the_loop_hangs(where, monkeypatch, caplog):
    """Though the watchdog runs.  A beat that comes back sends only what it had begun to send."""
    every = 2 * beat.HANGS * TIMEOUT
    world = World({"seldom": every})
    run_until_due(world, every)
    hung, before, begun = world.leader, len(world.sent), []

    def hang(one):
        if one is hung.scheduler and not begun:
            begun.append(world.now)
            while world.now < begun[0] + (beat.HANGS + 2) * TIMEOUT:
                world.run(STEP, but=hung)
                hung.watchdog.tick()
                assert hung.leads or world.now > begun[0] + beat.HANGS * TIMEOUT

    def send(*about):
        hang(hung.scheduler)
        sends(*about)

    sends, hung.sends = hung.sends, send if where == "sending" else hung.sends
    if where == "connecting":
        monkeypatch.setattr(type(hung.scheduler), "producer", property(hang))
    while not begun:
        world.advance(STEP)
        hung.go_round()
    assert world.leader is not hung
    (said,) = [one for one in caplog.messages if one.startswith("Beat hangs, lock 'beat'")]
    assert "for more than 12 s" in said
    world.run(TIMEOUT)
    times = Counter(one.id for one in world.sent[before:])
    twice = [one.id for one in world.sent if one.by is hung and one.at >= begun[0]]
    assert len(twice) == (where == "sending")
    assert [one for one in times if times[one] > 1] == twice


def test_a_beat_that_sleeps_for_long_leads_on(monkeypatch):
    """Its next entry is due tomorrow, and its loop goes round each five minutes."""
    world = World({"daily": crontab(hour=0, minute=0)})
    world.run(2.0)
    leader = world.leader
    while (pause := leader.scheduler.tick()) == 0:
        pass
    assert pause > 2 * beat.HANGS * TIMEOUT
    for _ in range(int(pause / STEP)):
        world.advance(STEP)
        leader.watchdog.tick()
        assert leader.leads


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_answer_to_a_claim_sends_nothing(when, caplog):
    """The beat says so once, and sends the tick under the same id when it is answered again."""
    caplog.set_level(logging.INFO)
    world = World({"often": 2.0})
    run_until_due(world)
    leader, sent = world.leader, len(world.sent)
    leader.around = lambda now: away(now) if now == when else None
    world.run(2 * STEP)
    leader.around = lambda _when: None
    assert len(world.sent) == sent
    world.run(2 * STEP)
    assert len(world.sent) == sent + 1
    assert caplog.text.count("until the lock server answers: lock server redis://nowhere: ") == 1
    assert world.leader is leader


@pytest.mark.parametrize("way", ["stopped", "cut off"])
def test_a_tick_whose_note_got_no_answer_goes_out_once(way):
    """Its beat lives, and knows that: no beat sends it again, neither the next one nor itself."""
    world = World({"seldom": 60.0}, beats=1)
    run_until_due(world, 60.0)
    before, leader = len(world.sent), world.leader
    with notes_unanswered(leader):
        world.run(4 * STEP if way == "stopped" else 2 * TIMEOUT)
    world.run(2.0)
    if way == "stopped":
        leader.stop()
        world.beats = [world.start()]
    world.run(TIMEOUT)
    assert [one.id for one in world.sent[before:]] == [world.sent[-1].id]
    world.run(60.0)
    assert len(world.sent) == before + 2


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_wrong_clock_is_said_once(caplog, ahead):
    """A beat whose clock is set wrong while it leads gives the lock to the next, due or not."""
    world = World({"often": 2.0})
    run_until_due(world)
    wrong, sent = world.leader, len(world.sent)
    wrong.clock_ahead = ahead
    world.run(TIMEOUT)
    assert not wrong.leads
    assert world.leader is not wrong
    world.run(5 * TIMEOUT)
    assert caplog.text.count(f"its clock differs by {ahead} s") == 1
    assert {one.by for one in world.sent[sent:]} == {world.leader}


def test_a_handler_of_a_signal_does_not_release_in_the_middle_of_a_tick():
    """Celery closes the scheduler in the handler of SIGTERM; the lock may be in use then."""
    world = World({"often": 2.0})
    run_until_due(world)
    leader = world.leader
    leader.around = lambda _when: leader.scheduler.close()
    world.run(2 * STEP)
    leader.around = lambda _when: None
    assert leader.leads
    leader.scheduler.close()
    assert not leader.leads


@pytest.mark.parametrize(("pause", "by"), [(limit, ("0", "")), (hold_back, (100, 0))])
def test_a_pause_stops_the_leader_too(pause, by):
    """It sends nothing and has no lease until the lock is resumed; what became due is sent once."""
    world = World({"often": 2.0})
    run_until_due(world)
    leader, sent = world.leader, len(world.sent)
    pause(world, by[0])
    world.run(3 * TIMEOUT)
    assert len(world.sent) == sent
    assert not leader.leads
    assert not Overview(world.server, "dislock").lock("dislock:{beat}").is_leaderless
    pause(world, by[1])
    world.run(2 * STEP)
    assert len(world.sent) == sent + 1
    world.run(4.0)
    assert len(world.sent) == sent + 3


def test_two_that_lead_send_each_tick_once():
    """An operator has let two lead: the claim of one refuses that of the other."""
    world = World({"often": 2.0})
    run_until_due(world)
    limit(world, "2")
    world.run(20)
    assert [one.leads for one in world.beats] == [True, True]
    assert len({one.id for one in world.sent}) == len(world.sent)
    ticks = [one.tick for one in world.ticks("often")]
    assert min(b - a for a, b in pairwise(ticks)) >= 2 - STEP


def test_a_late_note_takes_no_tick_back():
    """Two lead; the note of one got no answer, and the other has sent the next tick meanwhile."""
    world = World({"often": 1.0})
    run_until_due(world, 1.0)
    limit(world, 2)
    world.run(5)
    first, second = world.beats
    with notes_unanswered(first):
        while first.around is not away:
            world.run(STEP)
        while world.sent[-1].by is first:
            world.run(STEP)
        assert first.leads
    world.run(10.0)
    assert {one.by for one in world.sent} == {first, second}
    assert min(b.at - a.at for a, b in pairwise(world.sent)) >= 1 - STEP


def test_who_leads_and_when_it_sent_is_on_the_lock_server():
    """For the commands, doctor and metrics; also after the last beat has gone."""
    world = World({"often": 2.0}, beats=1)
    overview = Overview(world.server, "dislock")
    assert overview.lock("dislock:{beat}").ticked is None
    run_until_due(world)
    led = overview.lock("dislock:{beat}")
    assert [is_beat(one) for one in led.holders] == [True]
    assert led.ticked == pytest.approx(2.0 - 2 * STEP, abs=0.1)
    assert not led.is_leaderless
    world.leader.stop()
    world.advance(60.0)
    left = overview.lock("dislock:{beat}")
    assert left.is_leaderless
    assert left.ticked == pytest.approx(led.ticked + 60.0, abs=0.1)


def test_entries_that_are_long_gone_are_forgotten():
    """Those of this schedule are not, however seldom they are due."""
    world = World({"yearly": crontab(minute=0, hour=0, day_of_month=1, month_of_year=1)})
    world.run(1)
    world.schedule["once"] = {"task": "once", "schedule": 2.0}
    world.leader.stop()
    world.beats = [world.start()]
    world.run(5)
    assert set(records(world)) == {"yearly", "once"}
    del world.schedule["once"]
    for days in (16, 16, 0):
        world.beats[0].stop()
        world.beats = [world.start()]
        world.run(TIMEOUT)
        world.advance(days * 24 * HOUR)
    assert set(records(world)) == {"yearly"}


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        (
            {"dislock_beat_key": "a{b"},
            "dislock_beat_key='a{b': the key holds '{', which no key may",
        ),
        ({"beat_scheduler": object}, "give a class that extends celery.beat.Scheduler"),
        ({"dislock_beat_timeout": 0}, "dislock_beat_timeout=0: give finite seconds above 0"),
        ({"dislock_url": "memory://"}, "dislock_url='memory://': beats need one lock server"),
        ({"dislock_url": ["redis://a", "redis://b", "redis://c"]}, "beats need one lock server"),
    ],
)
def test_a_beat_that_cannot_have_its_lock_does_not_start(conf, told):
    """The message names the setting, its value and what to do."""
    app = Celery("beats", set_as_current=False)
    app.conf.update({"dislock_url": "redis://nowhere", "dislock_enabled": True, **conf})
    with pytest.raises(SystemExit, match="Cannot start with locks") as caught:
        Service(app, scheduler_cls=app.conf.beat_scheduler).get_scheduler(lazy=True)
    assert told in str(caught.value)


def test_the_options_choose_the_scheduler():
    """--dislock extends the one that is in use, --no-dislock and no option leave it alone."""
    assert [option.name for option in beat_command.params[-2:]] == ["dislock", "dislock_url"]
    for enabled, extended in ((True, True), (False, False), (None, False)):
        app = Celery("beats", broker="redis://nowhere", set_as_current=False)
        app.conf.dislock_enabled = enabled
        scheduler = Service(app).get_scheduler(lazy=True)
        assert isinstance(scheduler, PersistentScheduler)
        assert isinstance(scheduler, beat.BeatLock) is extended
    assert beat.with_lock(type(scheduler)) is beat.with_lock(beat.with_lock(type(scheduler)))
