"""Tokenizer speed beside simpler algorithms and the Rust `tokenizers` library, on one core.

    python benchmarks/tokenizer.py [--quick] [--json FILE] [--corpus FILE]

Every number is megabytes of input per second of processor time, the best of the rounds in which ours and the
peer take turns; threads are off. Both results must be equal or the script stops, unless the row says that the
peer solves an easier problem. `--corpus` takes the first bytes of a file instead of made-up text.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from artifacts import TokenizerSpec
from riftco.tokenizer import Tokenizer
from riftco.tokenizer.bpe_training import MergeRule, train_merge_rules

MINIMUM_PAIR_FREQUENCY = 2
SMALLEST_CORPUS = 100_000  # bytes; on less, fixed costs hide what grows


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours and a peer on one input; `target` is the least ratio of their speeds that will do."""

    work: str
    size: int
    ours: Callable[[], Any]
    peer: str
    theirs: Callable[[], Any]
    target: float | None
    same_problem: bool = True

    def measure(self, rounds: int) -> dict[str, Any]:
        """The row: speeds in MB/s, above 1 in `ratio` meaning ours is faster."""
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(_timed(self.ours))
            theirs.append(_timed(self.theirs))
        if self.same_problem and ours[-1][1] != theirs[-1][1]:
            raise SystemExit(f"{self.work}: the results differ from those of the peer ({self.peer})")
        speed, peer_speed = (self.size / 1e6 / min(run[0] for run in runs) for runs in (ours, theirs))
        row: dict[str, Any] = {"work": self.work, "ours": round(speed, 3), "unit": "MB/s", "peer": self.peer}
        row |= {"peer_value": round(peer_speed, 3), "ratio": round(speed / peer_speed, 2)}
        met = None if self.target is None else speed / peer_speed >= self.target
        return row | {"target": self.target, "met": met}


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def english_like(size: int) -> bytes:
    """Made-up words with the frequencies of Zipf's law, and punctuation; the same bytes for everyone."""
    random = np.random.default_rng(5489)
    letters = np.array(list("eeeeetttaaaooniishhrrddlluucmfwypvbgk"))
    lexicon = np.array(["".join(random.choice(letters, random.integers(1, 10))) for _ in range(20_000)])
    ranks = np.minimum(random.zipf(1.3, size), len(lexicon)) - 1
    ends = random.choice([*[" "] * 8, ", ", ".\n"], len(ranks))
    return "".join(np.char.add(lexicon[ranks], ends)).encode()[:size]


def recount(corpus: bytes, vocabulary_size: int) -> tuple[MergeRule, ...]:
    """Peer: count all pairs anew before each merge and rewrite the whole sequence, vectorised."""
    symbols = np.frombuffer(corpus, dtype=np.uint8).astype(np.int64)
    rules: list[MergeRule] = []
    for new in range(256, vocabulary_size):
        counts = np.bincount(symbols[:-1] * new + symbols[1:])
        best = int(np.argmax(counts))
        if counts[best] < MINIMUM_PAIR_FREQUENCY:
            break
        left, right = divmod(best, new)
        rules.append((left, right, new))
        places = np.flatnonzero((symbols[:-1] == left) & (symbols[1:] == right))
        if left == right:
            places = _without_overlap(places)
        symbols[places] = new
        symbols = np.delete(symbols, places + 1)
    return tuple(rules)


def _without_overlap(places: np.ndarray) -> np.ndarray:
    kept: list[int] = []
    for place in places.tolist():
        if not kept or place > kept[-1] + 1:
            kept.append(place)
    return np.array(kept)


def library_train(corpus: bytes, vocabulary_size: int, *, split_words: bool) -> tuple[MergeRule, ...]:
    """Peer: the library's trainer, the corpus as one word or split before every space."""
    library = Library(models.BPE())
    if split_words:
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=MINIMUM_PAIR_FREQUENCY,
        initial_alphabet=[chr(value) for value in range(256)],
        show_progress=False,
    )
    library.train_from_iterator([corpus.decode("latin-1")], trainer)
    ids = library.get_vocab()
    merges = json.loads(library.to_str())["model"]["merges"]
    return tuple((ids[left], ids[right], ids[left + right]) for left, right in merges)


def library_encoder(tokenizer: Tokenizer) -> Library:
    """Peer: the library with our rules, no cutting."""
    names = [piece.decode("latin-1") for piece in tokenizer.vocabulary]
    merges = [(names[left], names[right]) for left, right, _ in tokenizer.merge_rules]
    return Library(models.BPE({name: token_id for token_id, name in enumerate(names)}, merges))


def library_encode(library: Library, data: bytes) -> list[int]:
    """Peer: the whole text as one word."""
    return library_batch(library, [data.decode("latin-1")])[0]


def library_batch(library: Library, documents: list[str]) -> list[list[int]]:
    """Peer: many texts in one call, on one core."""
    return [encoding.ids for encoding in library.encode_batch_fast(documents)]


def replace_passes(data: bytes, rules: tuple[MergeRule, ...]) -> list[int]:
    """Peer: one `str.replace` per rule, ids as code points."""
    text = data.decode("latin-1")
    for left, right, result in rules:
        text = text.replace(chr(left) + chr(right), chr(result))
    return [ord(symbol) for symbol in text]


def training(text: bytes, scale: int) -> Iterator[Comparison]:
    """Training beside recounting, and beside the library on the same and on an easier problem."""
    for size, vocabulary_size, target in ((1_000_000, 512, 1.0), (1_000_000, 2048, 4.0)):
        corpus = text[: max(size // scale, SMALLEST_CORPUS)]
        yield Comparison(
            f"train {vocabulary_size} ids on {len(corpus) / 1e6:g} MB",
            len(corpus),
            partial(train_merge_rules, corpus, vocabulary_size, MINIMUM_PAIR_FREQUENCY),
            "numpy, recount before each merge",
            partial(recount, corpus, vocabulary_size),
            target,
        )
    library_cases: list[tuple[int, int, str, bool, float | None]] = [
        (100_000, 512, "tokenizers, one word", False, 10.0),
        (5_000_000, 4096, "tokenizers, split at spaces (easier: no merge spans words)", True, None),
    ]
    for size, vocabulary_size, peer, split_words, least in library_cases:
        corpus = text[: max(size // scale, SMALLEST_CORPUS)]
        yield Comparison(
            f"train {vocabulary_size} ids on {len(corpus) / 1e6:g} MB",
            len(corpus),
            partial(train_merge_rules, corpus, vocabulary_size, MINIMUM_PAIR_FREQUENCY),
            peer,
            partial(library_train, corpus, vocabulary_size, split_words=split_words),
            least,
            same_problem=not split_words,
        )


def encoding(text: bytes, scale: int) -> Iterator[Comparison]:
    """Encoding of one long text and of many short ones."""
    data = text[: 1_000_000 // scale]
    documents = [data[start : start + 300].decode("latin-1") for start in range(0, len(data), 300)]
    for vocabulary_size, passes_target in ((512, 1.0), (4096, 5.0)):
        rules = train_merge_rules(data, vocabulary_size, MINIMUM_PAIR_FREQUENCY)
        tokenizer = Tokenizer.from_spec(TokenizerSpec("bpe", merge_rules=rules))
        tokenizer.encode_bytes(data[:2000])  # the library is loaded and given the rules at the first use
        library = library_encoder(tokenizer)
        work = f"encode {len(data) / 1e6:g} MB with {tokenizer.vocab_size} ids"
        ours = partial(tokenizer.encode_bytes, data)
        passes = partial(replace_passes, data, rules)
        yield Comparison(work, len(data), ours, "str.replace, one pass per rule", passes, passes_target)
        whole = partial(library_encode, library, data)
        yield Comparison(work, len(data), ours, "tokenizers, one word", whole, 2.0)
        work += ", documents of 300 bytes"
        short, batch = partial(tokenizer.encode_batch, documents), partial(library_batch, library, documents)
        yield Comparison(work, len(data), short, "tokenizers, encode_batch_fast", batch, 0.8)


def main() -> None:
    """Measure, print a table, and write the rows as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="text to use instead of made-up words")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    text = arguments.corpus.read_bytes() if arguments.corpus else english_like(5_000_000)
    scale, rounds = (10, 1) if arguments.quick else (1, 2)
    rows = []
    for cases in (training(text, scale), encoding(text, scale)):
        for case in cases:
            rows.append(case.measure(rounds))
            print("{work}: {ours} {unit}; {peer}: {peer_value} {unit}; ratio {ratio}".format(**rows[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
