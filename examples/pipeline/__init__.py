"""Two models in a chain over HTTP: a detector, then a classifier of what it finds."""
