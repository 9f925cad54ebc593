"""A detector of speech over WebSocket: it remembers what each of its clients has sent."""
