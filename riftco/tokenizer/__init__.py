"""Text to token ids and back, over raw bytes: one id per byte, or byte-pair merges learned from a corpus."""

from riftco.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
