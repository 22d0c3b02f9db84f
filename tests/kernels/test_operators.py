import subprocess
import sys


def test_importing_the_package_does_not_import_triton() -> None:
    """It is 75 MiB and 0.2 s that nobody needs on a CPU; `torch.utils.flop_counter` imports it too."""
    program = "import sys, kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
