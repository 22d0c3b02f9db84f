"""The rows of `benchmarks/kernels.py`, a module for each kind of operation."""
