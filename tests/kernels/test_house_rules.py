"""What no Triton kernel here does, because it goes wrong in silence on some GPU or in some version."""

import re
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[2] / "kernels").glob("*/triton*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.parent.name)
def test_grids_lie_on_axis_0(path: Path) -> None:
    """The other axes end at 65,535 programs."""
    source = path.read_text()
    assert re.search(r"program_id\((axis=)?0\)", source)
    assert not re.search(r"(program_id|num_programs)\((axis=)?[12]\)", source)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.parent.name)
def test_products_say_their_precision_and_pointers_are_plain(path: Path) -> None:
    """A float32 product on a GPU is tf32 unless told otherwise; block pointers are gone in triton 3.9."""
    source = path.read_text()
    assert source.count("tl.dot(") == len(
        re.findall(r"tl\.dot\([^()]*(?:\([^()]*\)[^()]*)*input_precision=", source)
    )
    assert "make_block_ptr" not in source
