"""Promises of the project as a whole: its layers, its links, and a command that answers at once."""

import subprocess
import sys
from pathlib import Path

from docs.check_links import broken_links

ROOT = Path(__file__).parents[1]


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    assert broken_links(ROOT) == []


def test_help_and_plan_import_neither_torch_nor_prefect() -> None:
    code = (
        "import sys, flows.cli, flows.dag, tasks.plan\n"
        "heavy = {'torch', 'prefect', 'matplotlib', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
