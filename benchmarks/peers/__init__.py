"""Contenders of `benchmarks/training.py`: how each takes one optimiser step of the same size of model.

Each module has `step(size, method, variant)`: builds a model and an optimiser and returns a function that
trains on the next batch. `variant` is the contender's own: a precision, compiled or not. An error that it
raises says why a contender is not there.
"""
