"""Join rows to batches and split batches into rows: arrays, tensors, structures of them. Pure.

Runs in worker processes, and in any process that makes batches without one. Loading these files
imports neither NumPy nor PyTorch: a program that has an array has loaded its library.
"""
