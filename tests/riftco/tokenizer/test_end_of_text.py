"""The end-of-text token: an id of its own that no text encodes to, in the state that bundles always had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelBundle, TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer import Tokenizer
from tests.support import FIXTURES

CORPUS = "der Fluß läuft, the river runs, the mill and the miller: naïve 😀😀\r\n\t" * 5

ENDED = [
    Tokenizer(CORPUS, end_of_text=True),
    Tokenizer("".join(map(chr, range(0x800))), end_of_text=True),
    Tokenizer(CORPUS, method="bpe", vocabulary_size=300, end_of_text=True),
    Tokenizer("a", method="bpe", vocabulary_size=257, end_of_text=True),
]
ended = pytest.mark.parametrize("tokenizer", ENDED, ids=["byte", "more bytes", "bpe", "bpe without merges"])


@ended
def test_it_is_the_last_id_and_survives_a_bundle(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text_id == tokenizer.vocab_size - 1
    assert set(tokenizer.vocabulary[-1]) == {255}
    restored = Tokenizer.from_spec(TokenizerSpec.from_json(tokenizer.spec.to_json()))
    assert restored.end_of_text_id == tokenizer.end_of_text_id


@ended
def test_no_text_encodes_to_it(tokenizer: Tokenizer) -> None:
    @given(st.text() | st.text(alphabet="ÿ\u07ff\uffff\U0010ffff�\xfe\xffa"))
    def check(text: str) -> None:
        try:
            ids = tokenizer.encode(text)
        except TokenizerError:  # a byte tokenizer knows only the bytes of its corpus
            assert tokenizer.method == "byte"
            return
        assert tokenizer.end_of_text_id not in ids
        assert tokenizer.decode(ids) == text

    check()


@pytest.mark.parametrize("text", ["\xff\xff", "<|endoftext|>", "\\xff\\xff", "\ufffd\ufffd", "255 255"])
def test_text_that_looks_like_it_does_not_encode_to_it(text: str) -> None:
    tokenizer = ENDED[2]
    assert tokenizer.end_of_text_id not in tokenizer.encode(text)


def test_everything_else_encodes_as_without_it() -> None:
    plain = Tokenizer(CORPUS, method="bpe", vocabulary_size=299)
    assert ENDED[2].merge_rules[:-1] == plain.merge_rules
    assert ENDED[2].encode(CORPUS) == plain.encode(CORPUS)
    assert ENDED[0].encode(CORPUS) == Tokenizer(CORPUS).encode(CORPUS)


def test_it_counts_as_one_of_the_ids() -> None:
    assert ENDED[2].vocab_size == 300
    assert ENDED[3].vocab_size == 257
    with pytest.raises(ValueError, match="vocabulary_size must be 257 to 4294967295, got 256"):
        Tokenizer("a", method="bpe", vocabulary_size=256, end_of_text=True)


def test_it_decodes_to_no_text_so_that_nobody_mistakes_it_for_some() -> None:
    tokenizer = ENDED[2]
    ids = [*tokenizer.encode("the mill"), tokenizer.vocab_size - 1]
    assert tokenizer.decode_bytes(ids) == b"the mill\xff\xff"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode(ids)


@pytest.mark.parametrize("method", ["byte", "bpe"])
def test_a_corpus_of_bytes_that_are_no_text_cannot_have_it(method: str) -> None:
    with pytest.raises(TokenizerError, match="holds the byte 0xFF"):
        Tokenizer(b"a\xffb", method=method, end_of_text=True)


@pytest.mark.parametrize("name", ["byte", "bpe", "edge", "bpe-lora-child"])
def test_the_originals_bundles_have_none(name: str) -> None:
    # `edge` lists byte 255, though not last.
    assert Tokenizer.from_spec(ModelBundle.load(FIXTURES / f"{name}.rift").tokenizer).end_of_text_id is None


@pytest.mark.parametrize("method", ["byte", "bpe"])
def test_a_tokenizer_of_text_has_none_unless_asked(method: str) -> None:
    assert Tokenizer(CORPUS, method=method).end_of_text_id is None
    assert Tokenizer("a", method=method).end_of_text_id is None
