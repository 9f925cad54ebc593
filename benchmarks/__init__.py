"""Measurements, one file per question; `benchmarks/README.md` says which and how to run them."""
