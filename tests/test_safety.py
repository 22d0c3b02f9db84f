"""What no file of the project may do: run what it reads, or hand a text to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "kernels", "riftco", "tasks", "flows", "data", "benchmarks", "docs")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen", "yaml.load"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        else:
            names = []
        yield from (f"imports {name}" for name in names if name in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield f"calls {ast.unparse(node.func)}"
            yield from ("uses a shell" for keyword in node.keywords if _is_on(keyword, "shell"))
            yield from ("loads pickles" for keyword in node.keywords if _is_on(keyword, "allow_pickle"))


def _is_on(keyword: ast.keyword, name: str) -> bool:
    return keyword.arg == name and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(path)",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=flag)",
    ],
)
def test_the_check_sees_what_it_forbids(source: str) -> None:
    assert list(offences(ast.parse(source)))
