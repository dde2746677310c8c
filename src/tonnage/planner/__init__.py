"""The space of configurations, the search for the fastest that fits, and the files that launch it."""
