"""Parked tasks: put in line on the lock server, given their turn, and looked after."""
