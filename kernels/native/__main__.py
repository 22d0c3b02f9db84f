"""`python -m kernels.native` says which native code runs here."""

from kernels.native import describe

print(describe())
