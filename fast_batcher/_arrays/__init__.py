"""Rows to batches and batches to rows: NumPy arrays, tensors, and what holds them. Pure.

Runs in worker processes, and wherever a batch is made without one. NumPy and PyTorch are never
imported by loading these files: who has an array has loaded its library.
"""
