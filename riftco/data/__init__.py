"""Text and instruction records from files, and their assignment to train, validation and test."""

from riftco.data.instructions import (
    InstructionExample,
    InstructionFormatter,
    PlainChatFormatter,
    PromptFormatter,
    format_parts,
    load_instructions,
    parse_instructions,
)
from riftco.data.splits import (
    InstructionSplits,
    Partition,
    SplitFractions,
    StableHashSplitter,
    formatter_name,
    freeze_instruction_formatter,
    validate_formatted_splits_disjoint,
)
from riftco.data.text import read_corpus, read_text, split_documents

__all__ = [
    "InstructionExample",
    "InstructionFormatter",
    "InstructionSplits",
    "Partition",
    "PlainChatFormatter",
    "PromptFormatter",
    "SplitFractions",
    "StableHashSplitter",
    "format_parts",
    "formatter_name",
    "freeze_instruction_formatter",
    "load_instructions",
    "parse_instructions",
    "read_corpus",
    "read_text",
    "split_documents",
    "validate_formatted_splits_disjoint",
]
