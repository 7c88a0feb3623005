"""A task's message: the message as received, the notes in its headers, and how to resend it."""
