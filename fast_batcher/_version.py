"""The version of the library. Runs in every process."""

__version__ = "0.1.0"
