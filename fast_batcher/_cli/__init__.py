"""The command `fast-batcher`, besides the library: it imports typer and rich."""
