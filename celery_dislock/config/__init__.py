"""What a user can set: options of tasks, settings of an app, and how each is checked."""
