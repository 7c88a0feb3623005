"""A small shop whose tasks use celery-dislock: the demo, and what the acceptance tests run."""
