"""A lock, its leases, and what keeps them alive; knows nothing of tasks or messages."""
