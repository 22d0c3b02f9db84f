"""Contenders of `benchmarks/serving.py`: how each continues prompts greedily with the same random weights.

Each module has `load(folder, variant, threads)`: opens the model that `work.write_model` left in the folder
and returns a function that continues prompts, all at once, by a number of tokens. `variant` is the
contender's own: a precision, a mode. An error that it raises says why a contender is not there.
"""
