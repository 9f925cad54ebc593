"""The load test of an HTTP endpoint: its client, measurements and comparisons."""
