"""What ``celery dislock doctor`` looks at: the lock server, the workers, and the locks."""
