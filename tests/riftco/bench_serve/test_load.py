"""Prompts: what is shared, what is not, and that they are always the same ones."""

import pytest

from riftco.bench_serve.load import Load, WritePrompt, id_prompts, word_prompts


@pytest.mark.parametrize("shared", [0.0, 0.75, 1.0])
def test_prompts_share_just_their_beginning(shared: float) -> None:
    write = id_prompts(Load(prompt_tokens=40, shared=shared), vocabulary_size=10**9)
    first, second = write(0, 0), write(0, 1)
    assert len(first) == len(second) == 40
    common = round(40 * shared)
    assert first[:common] == second[:common]
    assert all(a != b for a, b in zip(first[common:], second[common:], strict=True))
    assert common == 0 or write(1, 0)[:common] != first[:common], "the next level begins with nothing cached"


def test_ids_lie_in_the_vocabulary_and_reach_its_ends() -> None:
    prompt = id_prompts(Load(prompt_tokens=200), vocabulary_size=3)(0, 0)
    assert set(prompt) == {0, 1, 2}


def test_words_are_as_many_as_give_the_tokens() -> None:
    prompt = word_prompts(Load(prompt_tokens=60), tokens_per_word=1.5)(0, 0)
    assert isinstance(prompt, str)
    assert len(prompt.split(" ")) == 40
    assert len(str(word_prompts(Load(prompt_tokens=1), tokens_per_word=9.0)(0, 0)).split(" ")) == 1


def writers(load: Load) -> list[WritePrompt]:
    return [id_prompts(load, 1000), word_prompts(load, 1.0)]


def test_prompts_depend_on_seed_level_and_request_alone() -> None:
    for one, again, other in zip(*(writers(Load(seed=seed)) for seed in (1, 1, 2)), strict=True):
        assert one(0, 3) == again(0, 3)
        assert len({str(write(*at)) for write in (one, other) for at in ((0, 3), (0, 4), (1, 3))}) == 6


def test_levels_can_be_given_the_same_prompts_but_the_first_request_never_warms_them() -> None:
    for write in writers(Load(same_prompts=True)):
        assert write(0, 5) == write(2, 5)
        assert write(-1, 0) != write(0, 0)


def test_the_body_is_a_streaming_completion_with_its_usage() -> None:
    body = Load(new_tokens=9, temperature=0.5, seed=4).body("m", [1, 2], 3)
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
