"""Models that tests give to batchers, split by what goes wrong."""
