"""Join rows to batches and split batches into rows: arrays, tensors, structures of them. Pure.

Runs in worker processes, and in the user's process for `process_rows` and decorated functions.
Importing this package imports neither NumPy nor PyTorch: a program that has an array has loaded
its library.
"""
