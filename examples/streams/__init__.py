"""A small decoder over HTTP and WebSocket: it answers in steps, and streams its answers."""
