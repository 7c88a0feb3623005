"""The code around a task's body: the guard, conflicts, redelivery and crash release."""
