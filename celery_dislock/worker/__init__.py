"""The worker's part: start-up, shutdown, the sweep, and messages that no guard handles."""
