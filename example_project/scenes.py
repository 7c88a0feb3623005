"""
The six scenes of the demo.

Each plays on workers that run already, and computes its verdict from what really happened: the
exported files, the books, the results and the recorded timeline.  That no two bodies ran at a time
is read from the bodies' own marks, not from the locks'.
"""

from __future__ import annotations

import csv
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dislock import LockHeldError, LockLostError
from example_project import shop, timeline
from example_project.orders import COLUMNS, Books
from example_project.stage import Outcome, Stage, Timeline
from example_project.timeline import bodies, holds, most_at_once
from example_project.workers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from celery import Task
    from celery.result import AsyncResult

    from celery_dislock.tasks.handle import LockHandle
    from example_project.timeline import Span

CORPORATIONS = (1, 2, 3, 4)
CLICKS_EACH = 5
CLICK_PAUSE = 0.6  # seconds between two clicks on export
RENEWALS_LEAST = 6  # of an export: two watchdog timeouts, of three renewals each

ITEM, PIECES, CUSTOMERS = "lamp", 10, 30
CLICK_AGAIN = (0.02, 0.1)  # seconds after which a refused customer clicks again

SHELF, EDITS = "lamps", 20

CUSTOMER_IDS = (1, 2, 3)
PAYMENTS = (50, -40, 30, -35, 60, -65, 20, -20)  # of each; not one bounces in this order

KILLED_CORPORATION = 7
KILL_AFTER = 1.0  # seconds into the export
NEXT_START_MOST = 5.0  # seconds from the kill to the next export's start

SCENE_TIMEOUT = 60.0  # seconds for whatever a scene waits for
CAP_TIMEOUT = 15.0  # seconds until the runaway must have been stopped


def exports(stage: Stage) -> Outcome:
    """Click 20 times on export, for 4 corporations; each export lasts several watchdog timeouts."""
    since = time.time()
    shuffled = list(CORPORATIONS) * (CLICKS_EACH - 1)
    random.Random(4).shuffle(shuffled)
    clicks = []
    for corp_id in (*CORPORATIONS, *shuffled):
        clicks.append(shop.export.delay(corp_id))
        time.sleep(CLICK_PAUSE)
    _wait_for(clicks)

    events = stage.events(since)
    held, ran = holds(events), bodies(events)
    done = [click for click in clicks if click.state == "SUCCESS"]
    skipped = [click for click in clicks if click.state == "REVOKED"]
    failed = len(clicks) - len(done) - len(skipped)
    complete = [corp_id for corp_id in CORPORATIONS if _is_complete(corp_id)]
    shortest = min((span.end - span.start for span in ran if span.end), default=0.0)
    renewals = min((len(span.renewals) for span in held), default=0)
    most = most_at_once(ran)

    outcome = Outcome(
        f"{len(clicks)} clicks: {len(done)} exports ran, {len(skipped)} were skipped, "
        f"{failed} failed; the shortest lasted {shortest / stage.watchdog_timeout:.1f} watchdog "
        f"timeouts, no lock was renewed less than {renewals} times; at most {most} of one "
        f"corporation at a time; {len(complete)} of {len(CORPORATIONS)} files complete"
    )
    outcome.expect(most == 1, f"{most} exports of one corporation ran at a time")
    noted = shop.overlaps()
    outcome.expect(not noted, f"{len(noted)} exports began while another ran ({', '.join(noted)})")
    outcome.expect(complete == list(CORPORATIONS), f"files complete only of {complete}")
    outcome.expect(not failed, f"{failed} exports failed")
    outcome.expect(bool(skipped), "no click was skipped")
    outcome.expect(renewals >= RENEWALS_LEAST, f"a lock was renewed {renewals} times only")
    if skipped:
        outcome.notes.append(f"a skipped click's result: REVOKED, {skipped[0].result}")
    headline = (
        f"{len(clicks)} clicks on export: {len(ran)} ran, at most {most} per key at a time; "
        f"{len(skipped)} were refused"
    )
    outcome.timelines.append(Timeline.of("", events, headline=headline))
    return outcome


def flash_sale(stage: Stage) -> Outcome:
    """Sell 10 lamps to 30 customers at once: without the lock, then with it."""
    oversold = _sell_lamps(stage, shop.buy_without_lock, "without the lock")
    exact = _sell_lamps(stage, shop.buy, "with the lock")
    outcome = Outcome(
        f"{PIECES} {ITEM}s for {CUSTOMERS} customers. Without the lock: {oversold.sold} sold, "
        f"oversold by {oversold.sold - PIECES}. With it: {exact.sold} sold, {exact.left} left, in "
        f"{exact.clicks} clicks: {'exactly sold out' if exact.sold == PIECES else 'WRONG'}"
    )
    outcome.expect(oversold.sold > PIECES, "the sale without the lock did not oversell")
    outcome.expect(exact.sold == PIECES, f"{exact.sold} of {PIECES} sold with the lock")
    outcome.expect(exact.left == 0, f"the books say that {exact.left} are left")
    outcome.expect(not exact.failed, f"{exact.failed} purchases failed")
    outcome.expect(exact.most == 1, f"{exact.most} purchases at a time with the lock")
    outcome.timelines += [oversold.timeline, exact.timeline]
    return outcome


def reindex(stage: Stage) -> Outcome:
    """Edit a shelf 20 times in a burst; each edit asks for a new search index of what it left."""
    since = time.time()
    clicks: list[AsyncResult[int]] = []
    for burst in ([1], range(2, EDITS), [EDITS]):  # the first comes first, and the last one last
        clicks += [shop.reindex.delay(SHELF, edition) for edition in burst]
        _wait_until_come(stage, since, clicks)
    last = clicks[-1]
    wait_until(lambda: last.ready() or last.state == "PARKED", "the last is in line", SCENE_TIMEOUT)
    meanwhile = f"{last.state}, {last.result}"
    in_line = last.state == "PARKED"
    _wait_for(clicks)

    events = stage.events(since)
    ran = bodies(events)
    most = most_at_once(ran)
    done = [click.result for click in clicks if click.state == "SUCCESS"]
    skipped = [click for click in clicks if click.state == "REVOKED"]
    index = shop.edition_of_index(SHELF)
    outcome = Outcome(
        f"{EDITS} edits: the index was made {len(ran)} times; {len(skipped)} made room in the line "
        f"for a newer one; at most {most} at a time; the index is of edition {index}"
    )
    noted = shop.overlaps().count(f"reindex-{SHELF}")
    outcome.expect(not noted, f"{noted} began while another ran")
    outcome.expect(most == 1, f"{most} ran at a time")
    outcome.expect(len(ran) == 2, f"{len(ran)} runs, not one at once and one after it")  # noqa: PLR2004
    outcome.expect(len(skipped) == EDITS - 2, f"{len(skipped)} were skipped")
    outcome.expect(done == [1, EDITS], f"the index was made of the editions {done}")
    outcome.expect(index == EDITS, f"the index is of edition {index}")
    outcome.expect(in_line, "the last one was not seen in line")
    outcome.notes.append(f"the last one's result while it was in line: {meanwhile}")
    if skipped:
        outcome.notes.append(f"a skipped one's result: REVOKED, {skipped[0].result}")
    headline = (
        f"{EDITS} edits of one shelf: {len(ran)} index runs, at most {most} at a time; "
        f"{len(skipped)} replaced in line"
    )
    outcome.timelines.append(Timeline.of("", events, headline=headline, others="parked"))
    return outcome


def payments(stage: Stage) -> Outcome:
    """Book 8 payments of each of 3 customers, in order; and sell a lamp while they are in line."""
    since = time.time()
    books = Books(shop.shop_folder())
    books.put_on_sale(ITEM, 1)
    clicks: list[AsyncResult[Any]] = []
    for number, amount in enumerate(PAYMENTS, start=1):
        clicks += [shop.apply_payment.delay(each, number, amount) for each in CUSTOMER_IDS]
        for customer_id in CUSTOMER_IDS:
            lock = shop.apply_payment.lock_for(customer_id, number, amount)
            _wait_until_in_line(stage, since, lock, number)
    lamp = shop.buy.delay(ITEM, "customer 4")
    _wait_for([*clicks, lamp])

    events = stage.events(since)
    ran = [span for span in bodies(events) if span.key.startswith("account:")]
    sale = _span_of(stage, since, lamp.id)
    in_line = sum(span.start > sale.start for span in ran) if sale else 0
    most = most_at_once(ran)
    bounced = [click for click in clicks if click.result == "bounced"]
    failed = [click for click in clicks if click.state != "SUCCESS"]
    right = [
        customer_id
        for customer_id in CUSTOMER_IDS
        if books.statement_of(customer_id) == _statement(PAYMENTS)
    ]
    outcome = Outcome(
        f"{len(clicks)} payments: {len(bounced)} bounced, {len(failed)} failed; at most {most} of "
        f"one customer at a time; {len(right)} of {len(CUSTOMER_IDS)} statements have all payments "
        f"in order; on {stage.slots} worker slots, a lamp was sold while {in_line} payments waited"
    )
    outcome.expect(most == 1, f"{most} payments of one customer at a time")
    outcome.expect(not bounced, f"{len(bounced)} payments bounced")
    outcome.expect(not failed, f"{len(failed)} payments failed")
    outcome.expect(right == list(CUSTOMER_IDS), f"statements right only of {right}")
    outcome.expect(lamp.result == "sold", f"the lamp: {lamp.state}, {lamp.result}")
    outcome.expect(
        in_line > stage.slots,
        f"when the lamp was sold {in_line} payments waited: no more than there are slots",
    )
    headline = (
        f"{len(clicks)} payments: at most {most} per customer at a time; "
        f"{len(right)} of {len(CUSTOMER_IDS)} statements in order"
    )
    outcome.timelines.append(Timeline.of("", events, headline=headline, others="parked"))
    return outcome


def runaway(stage: Stage) -> Outcome:
    """Run a task that never ends by itself, whose lock may be renewed 5 times."""
    since = time.time()
    first = shop.runaway.delay()
    wait_until(first.ready, "the runaway task was stopped", CAP_TIMEOUT)
    locked = stage.is_locked("runaway")
    clicked = time.time()
    second = shop.runaway.delay()
    wait_until(second.ready, "the second runaway task was stopped", CAP_TIMEOUT)

    events = stage.events(since)
    held = holds(events)
    span = next((span for span in held if span.task_id == first.id), None)
    again = next((span for span in held if span.task_id == second.id), None)
    cap = shop.MAX_RENEW_TIMES
    renewals = len(span.renewals) if span else 0
    stopped = span.end - span.capped if span and span.end and span.capped else None
    outcome = Outcome(
        f"renewed {renewals} times, cap {cap}; stopped {_seconds(stopped)} after the cap by "
        f"{type(first.result).__name__}; lock {'still held' if locked else 'free'} afterwards, and "
        f"taken again {_seconds(again.start - clicked if again else None)} after the next click"
    )
    outcome.expect(renewals == cap, f"{renewals} renewals")
    outcome.expect(stopped is not None, "the cap was not reported")
    outcome.expect(isinstance(first.result, LockLostError), f"it ended with {first.result!r}")
    outcome.expect(not locked, "its lock is still in Redis")
    outcome.expect(again is not None, "the next one did not get the lock")
    outcome.notes.append(f"its result: {first.state}, {first.result}")
    headline = f"A task that never ends: renewed {renewals} times; its cap is {cap}"
    outcome.timelines.append(Timeline.of("", events, headline=headline))
    return outcome


def killed_child(stage: Stage) -> Outcome:
    """Kill a pool process in the middle of an export with SIGKILL; clicks on export go on."""
    since = time.time()
    key = f"export:{KILLED_CORPORATION}"
    first = shop.export.delay(KILLED_CORPORATION)
    wait_until(lambda: _span_of(stage, since, first.id) is not None, "export began", SCENE_TIMEOUT)
    victim = _span_of(stage, since, first.id)
    assert victim is not None  # noqa: S101  # just waited for
    time.sleep(KILL_AFTER)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.time()
    timeline.record("killed", key=key, id=first.id)

    clicks: list[AsyncResult[int]] = []

    def clicked_through() -> bool:
        clicks.append(shop.export.delay(KILLED_CORPORATION))
        return any(span.task_id != first.id for span in bodies(stage.events(since)))

    wait_until(clicked_through, "the next export began", SCENE_TIMEOUT)
    _wait_for(clicks)

    events = stage.events(since)
    held, ran = holds(events), bodies(events)
    gap = next(span.start for span in ran if span.task_id != first.id) - killed_at
    left = stage.watchdog_timeout - (killed_at - victim.start)
    most = most_at_once(ran)
    complete = _is_complete(KILLED_CORPORATION)
    outcome = Outcome(
        f"process {victim.pid} killed {killed_at - victim.start:.1f} s into its export, lease good "
        f"for {left:.1f} s more; the next export began {gap:.2f} s after the kill; at most {most} "
        f"at a time; file {'complete' if complete else 'INCOMPLETE'}"
    )
    outcome.expect(gap <= NEXT_START_MOST, f"{gap:.1f} s until the next export began")
    outcome.expect(gap < left, "the lock was only free when its lease had run out")
    outcome.expect(bool(held), "no lock was held")
    outcome.expect(most == 1, f"{most} exports ran at a time")
    outcome.expect(complete, "the file is not complete")
    outcome.notes.append(f"the killed export's result: {first.state}, {first.result}")
    headline = f"A process is killed in mid-export: the next export starts {gap:.2f} s later"
    outcome.timelines.append(Timeline.of("", events, headline=headline))
    return outcome


@dataclass
class _Sale:
    sold: int
    left: int
    failed: int
    clicks: int
    most: int
    timeline: Timeline


def _sell_lamps(stage: Stage, buy: Task, how: str) -> _Sale:
    since = time.time()
    books = Books(shop.shop_folder())
    books.put_on_sale(ITEM, PIECES)
    customers = [f"customer {number}" for number in range(1, CUSTOMERS + 1)]
    waiting = {customer: buy.delay(ITEM, customer) for customer in customers}
    again: dict[str, float] = {}  # customer: when to click again
    clicks, failed = len(waiting), 0

    def all_served() -> bool:
        nonlocal clicks, failed
        for customer, click in list(waiting.items()):
            if click.ready():
                del waiting[customer]
                if isinstance(click.result, LockHeldError):
                    again[customer] = time.monotonic() + random.uniform(*CLICK_AGAIN)
                elif click.failed():
                    failed += 1
        for customer in [name for name, when in again.items() if when <= time.monotonic()]:
            del again[customer]
            waiting[customer] = buy.delay(ITEM, customer)
            clicks += 1
        return not waiting and not again

    wait_until(all_served, "all customers were served", SCENE_TIMEOUT)
    events = stage.events(since)
    sold = books.sold(ITEM)
    headline = f"{how.capitalize()}: {PIECES} {ITEM}s for {CUSTOMERS} customers, {sold} sold"
    return _Sale(
        sold,
        books.stock_of(ITEM),
        failed,
        clicks,
        most_at_once(bodies(events)),
        Timeline.of(how, events, headline=headline),
    )


def _wait_for(results: Iterable[AsyncResult[Any]]) -> None:
    waiting = list(results)

    def all_ready() -> bool:
        waiting[:] = [result for result in waiting if not result.ready()]
        return not waiting

    wait_until(all_ready, f"results of all {len(waiting)} clicks", SCENE_TIMEOUT)


def _wait_until_come(stage: Stage, since: float, clicks: Iterable[AsyncResult[Any]]) -> None:
    """Return when all of these run or have asked for their lock: those sent later come later."""
    waiting = {click.id for click in clicks}

    def all_have_come() -> bool:
        events = stage.events(since)
        come = {event["id"] for event in events if event["what"] in {"conflict", "started"}}
        return waiting <= come

    wait_until(all_have_come, f"{len(waiting)} clicks have come to a worker", SCENE_TIMEOUT)


def _wait_until_in_line(stage: Stage, since: float, lock: LockHandle, tasks: int) -> None:
    """Return when so many tasks have run under a lock, run, or stand in its line."""

    def all_have_come() -> bool:
        begun = sum(span.key == lock.key for span in bodies(stage.events(since)))
        (state,) = lock.state()
        return begun + len(state.turns) + state.waiting >= tasks

    wait_until(all_have_come, f"{tasks} tasks have come to lock {lock.key}", SCENE_TIMEOUT)


def _is_complete(corp_id: int) -> bool:
    """Compare an exported file with the books."""
    folder = shop.shop_folder()
    exported = folder / f"corp-{corp_id}.csv"
    if not exported.exists():
        return False
    with exported.open(newline="", encoding="utf-8") as source:
        rows = [tuple(row) for row in csv.reader(source)]
    return rows == [COLUMNS, *Books(folder).orders_of(corp_id)]


def _statement(amounts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Write the statement of these payments, booked in order."""
    balances = itertools.accumulate(amounts)
    return [
        (number, amount, balance)
        for number, (amount, balance) in enumerate(zip(amounts, balances, strict=True), start=1)
    ]


def _span_of(stage: Stage, since: float, task_id: str) -> Span | None:
    ran = bodies(stage.events(since))
    return next((span for span in ran if span.task_id == task_id), None)


def _seconds(duration: float | None) -> str:
    return "never" if duration is None else f"{duration:.2f} s"


Scene = Callable[[Stage], Outcome]
SCENES: tuple[tuple[Scene, float], ...] = (  # each with its watchdog timeout, in seconds
    (exports, 2.0),
    (flash_sale, 2.0),
    (reindex, 2.0),
    (payments, 2.0),
    (runaway, 2.0),
    (killed_child, 30.0),  # the default, to show that nobody waits for it
)
