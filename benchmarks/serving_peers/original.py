"""The original, riftco-transformer: one stream, one token at a time, also through the prompt."""

from pathlib import Path

from benchmarks.serving_peers.work import BLOCKS, CONTEXT, HEADS, INNER, VOCABULARY, WIDTH, Generate


def load(folder: Path, variant: str, threads: int) -> Generate:
    """Random weights of its own; neither folder, variant nor threads is looked at."""
    import riftco_transformer as original

    model = original.DecoderOnlyTransformer(
        original.TransformerConfig(
            vocabulary_size=VOCABULARY,
            maximum_context=CONTEXT,
            model_width=WIDTH,
            head_count=HEADS,
            block_count=BLOCKS,
            feed_forward_width=INNER,
        )
    )

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        (prompt,) = prompts
        session = model.decode_session()
        tokens = list(prompt)
        for position in range(len(prompt) + new - 1):
            logits = session.step(tokens[position])
            if position >= len(prompt) - 1:
                scores = list(logits)
                tokens.append(scores.index(max(scores)))
        session.close()
        return [tokens[len(prompt) :]]

    return generate
