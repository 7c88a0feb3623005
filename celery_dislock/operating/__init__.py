"""What people and tools ask of the locks, and do to them, while the workers run."""
