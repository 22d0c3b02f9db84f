"""Builds the CPU code of `kernels`; everything else is in pyproject.toml.

One library for each level of instructions, of which `kernels.native` picks the best at run time. They are
optional: without a C++20 compiler the package installs all the same, and operations fall back to torch. The
test under AddressSanitizer reads the flags from here, which builds nothing.
"""

from glob import glob

FLAGS = ["-O3", "-std=c++20", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wno-psabi"]
LEVELS = {"baseline": [], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4", "-mavx512vnni"]}

if __name__ == "__main__":
    from setuptools import Extension, setup

    setup(
        ext_modules=[
            Extension(
                f"kernels.native._{name}",
                sources=sorted(glob("kernels/native/*.cpp")),
                depends=sorted(glob("kernels/native/*.h")),
                extra_compile_args=[*flags, *FLAGS],
                extra_link_args=["-pthread"],
                optional=True,
            )
            for name, flags in LEVELS.items()
        ]
    )
