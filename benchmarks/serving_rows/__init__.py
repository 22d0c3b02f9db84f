"""The rows of `benchmarks/serving.py`, a module for each part, each with `rows(...)`."""
