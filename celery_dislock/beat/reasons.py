"""What a beat logs: why it stands by, and what becomes of messages that did not go out."""

from __future__ import annotations

import logging

PAUSE = 1.0  # seconds until a beat that was refused asks again, or offers a tick again

# Why a beat stands by.
#: INFO: Another beat sends, or an operator has paused the lock.
HELD = "Beat stands by, lock %r: it is held by %s."
#: WARNING: No beat can send that cannot ask. -> Look at the lock server; of a right, `celery
#: dislock doctor` says which.
AWAY = "Beat stands by, lock %r: it sends nothing until the lock server answers: %s"
#: ERROR: The database or Redis of the scheduler did not answer; another beat leads if it can. ->
#: See the error at the end.
NO_SCHEDULE = "Beat stands by, lock %r: it cannot take over the schedule: %s: %s"
#: WARNING: This beat was stopped or cut off from the lock server for longer than its lease. -> If
#: it comes often, look why the process does not run.
LOST = "Beat stands by, lock %r: its lease has ended, and another beat may lead."
#: ERROR: It would send at wrong times; the other beats go on. -> Set this machine's clock, or the
#: lock server's.
CLOCK = (
    "Beat stands by, lock %r: its clock differs by %.0f s from the lock server's, which is more "
    "than dislock_beat_timeout. Set the clock right."
)

#: ERROR: A send hangs, or the database of the schedule; another beat leads. -> `py-spy dump --pid`
#: shows where; restart the beat.
HUNG = (
    "Beat hangs, lock %r: its loop has stood still for more than %g s, so its lease is renewed no "
    "more, and another beat may lead. Look at its connections to the broker and to its schedule."
)

# Of messages that the broker did not take, or that the beat before has not noted as sent.
#: WARNING: The broker did not take it. -> Look at the broker; the line ends with its error.
KEPT = (
    "Beat keeps a message that has not gone out, lock %r, entry %r. It is sent as soon as the "
    "broker takes it, unless the entry is due again before: %s"
)
#: INFO: A message that the broker had not taken, or of a beat that was killed, was sent.
GONE_OUT = "Beat has sent a message that was kept, lock %r, entry %r."
#: WARNING: It is not sent any more.
DROPPED = (
    "Beat drops a message that was kept, lock %r, entry %r: the entry was removed or disabled, or "
    "beat_cron_starting_deadline is over."
)
#: ERROR: Not because of the broker: its arguments cannot be serialized, for example. It is not
#: tried again. -> See the traceback.
UNSENDABLE = "Beat cannot send a message that was kept, lock %r, entry %r."


class StandBy(BaseException):
    """
    This beat must not send now.

    ``except Exception`` does not catch it: schedulers put that around each entry, and go on.

    Args:
        why: What is logged, unless it was the last thing that was logged; empty: nothing.
        about: Arguments of that.
        level: Level of that.
        pause: Seconds until the beat tries again.
    """

    def __init__(
        self, why: str = "", *about: object, level: int = logging.WARNING, pause: float = PAUSE
    ) -> None:
        super().__init__(why)
        self.why, self.about, self.level, self.pause = why, about, level, pause
