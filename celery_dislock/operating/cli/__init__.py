"""``celery dislock ...``: see and operate the locks of an app, from a terminal."""

from celery_dislock.operating.cli.group import dislock as dislock
