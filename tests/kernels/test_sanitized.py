"""The tests of the compiled CPU code once more, under AddressSanitizer and UndefinedBehaviorSanitizer.

The library is built as setup.py says, at the level that runs here, with the sanitizers in it. The tests
of `kernels` then run in a process of their own, where memory has no guards but the sanitizer's.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import library

ROOT = Path(__file__).parents[2]
LEVELS = {2: "baseline", 3: "v3", 4: "v4"}
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
    pytest.mark.skipif(library() is None, reason="no native code was built"),
]


def build(source: Path, folder: Path) -> Path:
    """Compile one source file into an object file in the folder."""
    machine = library().riftco_machine_level()
    settings = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    flags = [*settings["LEVELS"][LEVELS[machine]], *settings["FLAGS"], *SANITIZED, "-O1", "-g", "-fPIC"]
    target = folder / f"{source.stem}.o"
    include = f"-I{ROOT / 'kernels' / 'native'}"
    subprocess.run(["g++", *flags, include, "-c", str(source), "-o", str(target)], check=True)
    return target


def link(objects: list[Path], target: Path) -> Path:
    subprocess.run(
        ["g++", "-shared", "-pthread", *SANITIZED, *map(str, objects), "-o", str(target)], check=True
    )
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("objects")
    return [build(source, folder) for source in sorted((ROOT / "kernels" / "native").glob("*.cpp"))]


def run_tests(folder: str, native: Path) -> tuple[int, str]:
    """The exit status of pytest over the tests that run compiled code, and the reports of the sanitizers."""
    names = (
        "libasan.so",
        "libubsan.so",
        "libstdc++.so.6",
    )  # the last: exceptions of torch are seen by the first
    found = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names
    ]
    report = native.with_suffix(".report")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={report}",  # Python itself leaks at its end
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={report}",
        "RIFTCO_NATIVE": str(native),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", folder]
    command += ["-k", "not triton and not compiled and not planted and not lab and not level"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    reports = [path.read_text() for path in report.parent.glob(f"{report.name}.*")]
    return result.returncode, "\n".join([*reports, result.stdout[-4000:], result.stderr[-2000:]])


def test_no_memory_error_is_found(objects: list[Path], tmp_path: Path) -> None:
    status, output = run_tests("tests/kernels", link(objects, tmp_path / "sanitized.so"))
    assert status == 0, output
    assert "Sanitizer" not in output


def test_a_vector_read_past_the_end_is_found(objects: list[Path], tmp_path: Path) -> None:
    """One whose result is dropped, so that no other test can see it."""
    source = (ROOT / "kernels" / "native" / "gelu.cpp").read_text()
    right, wrong = "one(load_first(x + c, rest)", "one(load(x + c)"
    assert source.count(right) == 1
    changed = tmp_path / "gelu.cpp"
    changed.write_text(source.replace(right, wrong))
    others = [path for path in objects if path.stem != "gelu"]
    status, output = run_tests(
        "tests/kernels/gelu", link([*others, build(changed, tmp_path)], tmp_path / "bad.so")
    )
    assert status != 0
    assert "heap-buffer-overflow" in output
