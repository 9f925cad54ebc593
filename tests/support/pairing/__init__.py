"""The suite of pairs: what a batcher can be, as data; combinations of it; runs and their oracle."""
