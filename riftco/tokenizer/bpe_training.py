"""Which pairs to merge: byte-pair training over a whole corpus as one sequence, exact and incremental.

Each step takes the pair with the highest count, ties going to the smallest (left, right). The queue holds an
upper bound of every pair's count. Counts only fall once a pair exists (see `merging`), so when the pair at
the head turns out to occur as often as its bound says, no other pair can beat it; otherwise it goes back with
the count just found. On 5 MB of English that looks at four slots for every merge made.
"""

import heapq

import numpy as np

from riftco.tokenizer.merging import MergeableSequence, Pair

MergeRule = tuple[int, int, int]


def train_merge_rules(
    corpus: bytes, vocabulary_size: int, minimum_pair_frequency: int
) -> tuple[MergeRule, ...]:
    """The merge rules (left id, right id, new id) in the order they were learned; new ids count up from 256.

    Stops at `vocabulary_size` ids, or earlier when no pair occurs `minimum_pair_frequency` times.
    """
    sequence = MergeableSequence(corpus)
    slots: dict[Pair, np.ndarray] = {}
    queue: list[tuple[int, int, int]] = []
    rules: list[MergeRule] = []

    def enqueue(pairs: dict[Pair, np.ndarray]) -> None:
        slots.update(pairs)
        for pair, found in pairs.items():
            heapq.heappush(queue, (-len(found), *pair))

    enqueue(sequence.byte_pairs(minimum_pair_frequency))
    while queue and 256 + len(rules) < vocabulary_size:
        negative_bound, left, right = heapq.heappop(queue)
        pair = left, right
        occurrences = sequence.occurrences(pair, slots.pop(pair))
        if len(occurrences) == -negative_bound:
            new = 256 + len(rules)
            rules.append((left, right, new))
            enqueue(sequence.merge(pair, occurrences, new, minimum_pair_frequency))
        elif len(occurrences) >= minimum_pair_frequency:
            enqueue({pair: occurrences})
    return tuple(rules)
