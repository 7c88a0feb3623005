"""Parked tasks: joining a line on the lock server, getting a turn, and recovery by the sweep."""
