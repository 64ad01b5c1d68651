"""The pytest plugin, as repositories that are not ours run it."""
