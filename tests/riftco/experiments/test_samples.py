"""Lines end at a newline or with the context, and never depend on the line before."""

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from riftco import ModelRuntime
from riftco.experiments.samples import answer_prompts, complete_line, sample_lines
from riftco.model import DecoderOnlyTransformer
from riftco.serving import DecodeSession, GreedySampler, TextGenerator
from riftco.tokenizer import Tokenizer
from tests.support import FIXTURES

BPE = ModelBundle.load(FIXTURES / "bpe.rift")


def test_a_line_is_what_greedy_generation_gives_up_to_a_newline_or_the_end_of_the_context() -> None:
    for prompt in ("the river", "the mill", "night", "the river runs past"):
        with ModelRuntime.open(BPE) as runtime, DecodeSession(runtime.model) as session:
            line = complete_line(session, runtime.tokenizer, prompt, GreedySampler(), 99)
            generated = TextGenerator(runtime.model, runtime.tokenizer).generate(
                prompt, BPE.config.maximum_context
            )
        text = generated.raw_bytes[len(prompt.encode()) :].decode(errors="replace")
        assert text.split("\n")[0].strip().startswith(line)
        assert line or text.startswith("\n")


def test_the_same_prompt_gets_the_same_answer_wherever_it_stands() -> None:
    seen: list[tuple[int, int]] = []
    answers = answer_prompts(
        BPE, ["Who?", "What does the river do?", "Who?"], lambda *done: seen.append(done)
    )
    assert answers[0] == answers[2]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_line_has_at_most_the_tokens_asked_for() -> None:
    with ModelRuntime.open(BPE) as runtime, DecodeSession(runtime.model) as session:
        prompt = runtime.tokenizer.encode("the river")
        first = runtime.tokenizer.decode_bytes([GreedySampler()(runtime.model(prompt)[0, -1])])
        assert (
            complete_line(session, runtime.tokenizer, "the river", GreedySampler(), 1)
            == first.decode().strip()
        )


def test_a_line_ends_before_the_end_of_text_token() -> None:
    tokenizer = Tokenizer.from_spec(TokenizerSpec("byte", (10, 97, 98, 255)))
    model = DecoderOnlyTransformer(ModelConfig(4, 9, 4, 2, 1, 4))
    for script, line in (([2, 1, 3, 1], "ba"), ([3], ""), ([1, 0, 2], "a")):
        with DecodeSession(model) as session:
            tokens = iter(script)
            assert complete_line(session, tokenizer, "\n", lambda _, t=tokens: next(t), 9) == line


def test_samples_are_a_function_of_the_seed() -> None:
    first, again, other = (sample_lines(BPE, 5, seed, lambda *_: None) for seed in (1, 1, 2))
    assert first == again != other
    assert not any("\n" in line for line in first)


def test_a_prompt_longer_than_the_context_leaves_room_to_answer() -> None:
    text = "the miller counts the grain. " * 9
    with ModelRuntime.open(BPE) as runtime, DecodeSession(runtime.model) as session:
        newest = runtime.tokenizer.encode(text)[-14:]  # an eighth of the 16 tokens is left
        first = runtime.tokenizer.decode_bytes([GreedySampler()(runtime.model(newest)[0, -1])])
        line = complete_line(session, runtime.tokenizer, text, GreedySampler(), 99)
    assert line.encode().startswith(first.strip())
    assert len(line) > len(first.strip())
