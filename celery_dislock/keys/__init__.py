"""The key of a lock: its template, its values, and how tasks are named on the lock server."""
