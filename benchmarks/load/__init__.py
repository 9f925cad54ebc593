"""The parts of the load test: server, client, GPU, tables and plots."""
