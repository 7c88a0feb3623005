"""What a beat logs: why it stands by, and what becomes of messages that did not go out."""

from __future__ import annotations

import logging

PAUSE = 1.0  # seconds until a beat that was refused asks again, or offers a tick again

# Why a beat stands by.
HELD = "Beat stands by, lock %r: it is held by %s."
AWAY = "Beat stands by, lock %r: it sends nothing until the lock server answers: %s"
NO_SCHEDULE = "Beat stands by, lock %r: it cannot take over the schedule: %s: %s"
LOST = "Beat stands by, lock %r: its lease has ended, and another beat may lead."
CLOCK = (
    "Beat stands by, lock %r: its clock differs by %.0f s from the lock server's, which is more "
    "than dislock_beat_timeout. Set the clock right."
)

HUNG = (
    "Beat hangs, lock %r: its loop has stood still for more than %g s, so its lease is renewed no "
    "more, and another beat may lead. Look at its connections to the broker and to its schedule."
)

# Of messages that the broker did not take, or that the beat before has not noted as sent.
KEPT = (
    "Beat keeps a message that has not gone out, lock %r, entry %r. It is sent as soon as the "
    "broker takes it, unless the entry is due again before: %s"
)
GONE_OUT = "Beat has sent a message that was kept, lock %r, entry %r."
DROPPED = (
    "Beat drops a message that was kept, lock %r, entry %r: the entry was removed or disabled, or "
    "beat_cron_starting_deadline is over."
)
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
