"""One log line for each thing that happens to a task.

Celery logs every Ignore, Retry and Reject itself: ``Task … ignored`` gives no reason, ``Task …
retry: …`` repeats ours, and a Reject comes with a traceback.  If this package has logged what
happens and why, a filter drops Celery's line about the same exception.  All other lines of Celery
stay.  Celery's line is also kept if the level of our logger hides ours.

Ids and names in our lines come from messages.  A second filter writes them as text that is safe to
show, whichever module has logged the line.
"""

from __future__ import annotations

import logging
import sys

from celery_dislock.words import plain

logger = logging.getLogger("celery_dislock")


def _shown_plainly(record: logging.LogRecord) -> bool:
    """Escape the text of a record that is not all printable; a filter that drops no record."""
    line = record.getMessage()
    if not line.isprintable():
        record.msg, record.args = plain(line), ()
    return True


logger.addFilter(_shown_plainly)


def is_news(_record: logging.LogRecord) -> bool:
    """Refuse a record about an exception that ends a delivery, and was logged as such; a filter."""
    # Celery logs while it handles the exception, so sys.exc_info() returns that exception.
    return not getattr(sys.exc_info()[1], "dislock_logged", False)
