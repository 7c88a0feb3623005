"""The lock server of any kind: its connections, its scripts, and the leases on it."""
