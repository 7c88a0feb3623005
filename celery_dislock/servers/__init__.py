"""The lock server: its connections and scripts, whatever its kind, and the leases on it."""
