"""Keys of locks, their templates and values, and the names of tasks on the lock server."""
