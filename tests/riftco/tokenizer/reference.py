"""Byte-pair training and encoding as the contract words them: slow, short and easy to believe."""

from collections import Counter
from itertools import pairwise

from riftco.tokenizer.bpe_training import MergeRule


def replace_pair(symbols: list[int], rule: MergeRule) -> list[int]:
    """One left-to-right pass without overlap."""
    left, right, result = rule
    replaced: list[int] = []
    position = 0
    while position < len(symbols):
        if symbols[position : position + 2] == [left, right]:
            replaced.append(result)
            position += 2
        else:
            replaced.append(symbols[position])
            position += 1
    return replaced


def train(corpus: bytes, vocabulary_size: int, minimum_pair_frequency: int) -> tuple[MergeRule, ...]:
    """Recount every pair before each merge."""
    symbols = list(corpus)
    rules: list[MergeRule] = []
    while 256 + len(rules) < vocabulary_size and len(symbols) >= 2:
        counts = Counter(pairwise(symbols))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < minimum_pair_frequency:
            break
        rules.append((*best, 256 + len(rules)))
        symbols = replace_pair(symbols, rules[-1])
    return tuple(rules)


def encode(data: bytes, rules: tuple[MergeRule, ...]) -> list[int]:
    """One pass per rule, in list order."""
    symbols = list(data)
    for rule in rules:
        symbols = replace_pair(symbols, rule)
    return symbols
