"""A DAG of three steps, one of them mapped, for the tests of how steps run under Prefect."""

from artifacts import Ref
from tasks.call import Results, Work
from tasks.step import main_result, step


@step(version=1)
def write_text(work: Work, text: str) -> Results:
    """A text."""
    return {"text": work.store.put_bytes("text", text.encode())}


@step(version=1)
def repeat_text(work: Work, text: Ref, times: int) -> Results:
    """A text several times over."""
    if times < 1:
        raise ValueError(f"times must be at least 1, got {times}")
    return {"text": work.store.put_bytes("text", work.store.read_bytes(text) * times)}


@step(version=1)
def join_texts(work: Work, texts: tuple[Ref, ...]) -> Results:
    """Texts one after the other."""
    return {"text": work.store.put_bytes("text", b"+".join(map(work.store.read_bytes, texts)))}


def toy_dag(text: str, times: tuple[int, ...] = (2, 3)) -> Results:
    """The text repeated each number of times, joined."""
    written = write_text(text=text)
    repeated = repeat_text.map(text=written["text"], times=list(times))
    return join_texts(texts=tuple(main_result(results) for results in repeated))
