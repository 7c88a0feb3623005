"""The proof that a sceptic can rerun: workloads, faults, a history, and its checker."""
