"""Options of tasks and settings of an app, and the checks of their values."""
