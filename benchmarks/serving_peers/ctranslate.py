"""CTranslate2: the GPT-2 of transformers through its own converter."""

from pathlib import Path
from types import SimpleNamespace

from benchmarks.serving_peers.hugging_face import model
from benchmarks.serving_peers.work import VOCABULARY, Generate


def load(folder: Path, variant: str, threads: int) -> Generate:
    """`variant`: float32 or int8."""
    import ctranslate2
    from ctranslate2.converters.transformers import GPT2Loader

    target = folder / f"ctranslate-{variant}"
    if not target.exists():
        words = {f"w{i}": i for i in range(VOCABULARY)}
        # "w0" is named as what a text has to have; it may still be generated, and the length is forced.
        tokenizer = SimpleNamespace(bos_token="w0", eos_token="w0", unk_token="w0", get_vocab=lambda: words)
        spec = GPT2Loader()(model(folder), tokenizer)
        spec.validate()
        spec.optimize(quantization=variant)
        target.mkdir()
        spec.save(str(target))
    generator = ctranslate2.Generator(
        str(target), device="cpu", inter_threads=1, intra_threads=threads, compute_type=variant
    )

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        results = generator.generate_batch(
            [[f"w{i}" for i in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
        )
        return [list(result.sequences_ids[0]) for result in results]

    return generate
