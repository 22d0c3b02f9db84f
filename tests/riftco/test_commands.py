"""What the commands share: how errors end."""

import pytest
import torch
import typer

from riftco.commands import user_errors


def huge() -> None:
    torch.empty(1 << 50)


def too_big_for_the_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")


def out_of_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("work", [huge, too_big_for_the_gpu, out_of_python])
def test_memory_that_is_out_is_one_line_that_names_what_makes_a_run_smaller(work, capsys):
    with pytest.raises(typer.Exit) as caught, user_errors():
        work()
    said = capsys.readouterr().err
    assert (caught.value.exit_code, said.count("\n")) == (2, 1)
    assert said.startswith("riftco: memory is out")
    for setting in ("batch_size", "context_size", "model_width", "block_count"):
        assert setting in said


def test_an_error_of_ours_is_none_of_memory():
    with pytest.raises(RuntimeError, match="planted"), user_errors():
        raise RuntimeError("planted")
