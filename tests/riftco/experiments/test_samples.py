"""Lines end at a newline or with the context, and never depend on the lines beside them."""

from artifacts import ModelBundle
from riftco.data import PlainChatFormatter
from riftco.experiments.samples import ANSWER_TOKENS, answer_prompts, sample_lines
from riftco.serving import ModelService
from tests.support import FIXTURES

BPE = ModelBundle.load(FIXTURES / "bpe.rift")


def test_an_answer_is_the_first_line_that_greedy_generation_gives() -> None:
    prompts = ["a", "b", "it"]  # with the template, the context of 16 tokens is full soon
    answers = answer_prompts(BPE, prompts, lambda *_: None)
    newest = BPE.config.maximum_context - BPE.config.maximum_context // 8
    with ModelService(BPE) as service:
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = service.prompt_ids(PlainChatFormatter().format_prompt(prompt))[-newest:]
            text = service.tokenizer.decode_bytes(ids).decode()
            room = min(ANSWER_TOKENS, BPE.config.maximum_context - len(ids))
            whole = service.generate(text, max_new_tokens=room).raw_bytes[len(text.encode()) :]
            assert answer == whole.decode(errors="replace").split("\n")[0].strip()


def test_the_same_prompt_gets_the_same_answer_wherever_it_stands() -> None:
    seen: list[tuple[int, int]] = []
    prompts = ["Who?", "What does the river do?", "Who?"]
    answers = answer_prompts(BPE, prompts, lambda *done: seen.append(done))
    assert answers[0] == answers[2]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_samples_are_a_function_of_the_seed() -> None:
    first, again, other = (sample_lines(BPE, 5, seed, lambda *_: None) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 5
    assert len(set(first)) > 1
    assert not any("\n" in line for line in first)


def test_a_prompt_longer_than_the_context_leaves_room_to_answer() -> None:
    (answer,) = answer_prompts(BPE, ["the miller counts the grain. " * 9], lambda *_: None)
    (short,) = answer_prompts(BPE, ["grain. the miller counts the grain."], lambda *_: None)
    assert answer == short  # both end in the same newest tokens
