"""What happens around a task's body: the guard, conflicts, redelivery and crash release."""
