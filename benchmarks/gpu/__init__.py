"""Measurements on one GPU, in a few minutes and without a network: `python -m benchmarks.gpu`."""
