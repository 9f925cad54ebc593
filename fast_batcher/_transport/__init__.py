"""Transport between processes: frames and channels, pickling, progress, and log records."""
