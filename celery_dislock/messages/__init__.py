"""A task's message: as it came, what its headers note, and how it is sent again."""
