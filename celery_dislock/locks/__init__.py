"""Locks, their leases and the watchdog; nothing here depends on tasks or messages."""
