"""The tokenizer as its users meet it: round trips, settings, errors, life cycle, same everywhere."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelBundle, TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer import Tokenizer
from tests.support import FIXTURES, fixture

CORPUS = "der Fluß läuft, the river runs, the mill and the miller: naïve 😀😀\r\n\t" * 5
ALL_BYTES = bytes(range(256))
ALL_PAIRS = b"".join(bytes((x, y)) for x in ALL_BYTES for y in ALL_BYTES)

everything = pytest.mark.parametrize(
    "tokenizer",
    [Tokenizer(ALL_BYTES), Tokenizer(CORPUS, method="bpe", vocabulary_size=330)],
    ids=["byte", "bpe"],
)


@everything
def test_every_byte_in_every_position_round_trips(tokenizer: Tokenizer) -> None:
    for value in range(256):
        for position in range(4):
            data = bytearray(b"the ")
            data[position] = value
            assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(ALL_PAIRS)) == ALL_PAIRS


@everything
def test_any_text_round_trips_and_a_batch_is_each_text_alone(tokenizer: Tokenizer) -> None:
    @given(texts=st.lists(st.text(), max_size=4))
    def check(texts: list[str]) -> None:
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts

    check()


@everything
@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "<s>[INST]</s>", "[UNK]<unk><pad>", "<0x41>", "▁Ġ", "\x00"]
)
def test_text_that_looks_like_control_text_is_ordinary_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.vocabulary[token_id] for token_id in ids) == text.encode()
    assert ids == tokenizer.encode_bytes(text.encode())


@everything
def test_nothing_encodes_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == tokenizer.encode_bytes(b"") == tokenizer.encode_batch([]) == []
    assert tokenizer.encode_batch(["", ""]) == [[], []]
    assert tokenizer.decode([]) == ""


@everything
def test_a_tokenizer_restored_from_its_spec_is_the_same(tokenizer: Tokenizer) -> None:
    restored = Tokenizer.from_spec(TokenizerSpec.from_json(tokenizer.spec.to_json()))
    assert restored.spec == tokenizer.spec
    assert restored.vocabulary == tokenizer.vocabulary
    assert restored.vocab_size == tokenizer.spec.vocabulary_size == len(tokenizer.vocabulary)
    assert restored.encode(CORPUS) == tokenizer.encode(CORPUS)


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_a_bundle_encodes_prompts_as_the_original_did(name: str) -> None:
    tokenizer = Tokenizer.from_spec(ModelBundle.load(FIXTURES / f"{name}.rift").tokenizer)
    prompts = fixture(f"{name}.reference.json")["prompts"]
    assert tokenizer.encode_batch([prompt["text"] for prompt in prompts]) == [
        prompt["token_ids"] for prompt in prompts
    ]


def test_restored_bytes_keep_their_order() -> None:
    tokenizer = Tokenizer.from_spec(TokenizerSpec("byte", byte_vocabulary=(98, 97)))
    assert tokenizer.encode("ab") == [1, 0]
    assert tokenizer.vocabulary_bytes == b"ba"


def test_a_byte_vocabulary_is_ascending() -> None:
    assert Tokenizer("banana").vocabulary_bytes == b"abn"
    assert Tokenizer("banana").vocabulary == (b"a", b"b", b"n")


def test_bpe_learns_512_ids_unless_told_otherwise() -> None:
    varied = np.random.default_rng(3).integers(97, 123, 5000, dtype=np.uint8).tobytes()
    assert Tokenizer(varied, method="bpe").vocab_size == 512
    assert len(Tokenizer(varied, method="bpe", vocabulary_size=300).merge_rules) == 44


def test_bytes_like_corpora_are_equal_to_bytes() -> None:
    spec = Tokenizer(b"abcabc", method="bpe").spec
    assert Tokenizer("abcabc", method="bpe").spec == spec
    assert Tokenizer(bytearray(b"abcabc"), method="bpe").spec == spec
    assert Tokenizer(memoryview(b"-abcabc")[1:], method="bpe").spec == spec


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "BPE"}, ValueError, "'byte' or 'bpe', got 'BPE'"),
        ({"method": "byte", "vocabulary_size": 256}, ValueError, "vocabulary_size belongs to method 'bpe'"),
        ({"method": "byte", "minimum_pair_frequency": 1}, ValueError, "belongs to method 'bpe'"),
        ({"method": "bpe", "vocabulary_size": 255}, ValueError, "256 to 4294967295, got 255"),
        ({"method": "bpe", "vocabulary_size": 2**32}, ValueError, "got 4294967296"),
        ({"method": "bpe", "vocabulary_size": 300.0}, TypeError, "must be an integer, got 300.0"),
        ({"method": "bpe", "vocabulary_size": True}, TypeError, "must be an integer, got True"),
        ({"method": "bpe", "minimum_pair_frequency": 0}, ValueError, "at least 1, got 0"),
        ({"method": "bpe", "minimum_pair_frequency": True}, TypeError, "must be an integer, got True"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer("text", **settings)


@pytest.mark.parametrize("method", ["byte", "bpe"])
@pytest.mark.parametrize("corpus", ["", b""])
def test_an_empty_corpus_is_refused(method: str, corpus: str | bytes) -> None:
    with pytest.raises(TokenizerError, match="corpus is empty"):
        Tokenizer(corpus, method=method)


@pytest.mark.parametrize("corpus", [5, None, ["a"]])
def test_a_corpus_that_is_neither_text_nor_bytes_is_refused(corpus: object) -> None:
    with pytest.raises(TypeError, match="corpus must be bytes-like"):
        Tokenizer(corpus)


@everything
@pytest.mark.parametrize("bad", [-1, 10**6, 2**70])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(
        TokenizerError, match=rf"token id {bad} at position 1 .* 0 to {tokenizer.vocab_size - 1}$"
    ):
        tokenizer.decode_bytes([0, bad])


@everything
def test_the_first_id_outside_the_vocabulary_is_its_size(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode_bytes([tokenizer.vocab_size - 1]) == tokenizer.vocabulary[-1]
    with pytest.raises(TokenizerError):
        tokenizer.decode([tokenizer.vocab_size])


@everything
def test_decoding_takes_numpy_ids_and_refuses_fractions(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the mill")
    assert tokenizer.decode(np.array(ids)) == "the mill"
    with pytest.raises(TypeError):
        tokenizer.decode([1.0])


@everything
def test_decoding_is_strict_about_utf8(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_bytes("😀".encode()[:3])
    assert tokenizer.decode_bytes(ids) == b"\xf0\x9f\x98"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode(ids)


@everything
def test_text_and_bytes_are_not_confused(tokenizer: Tokenizer) -> None:
    for confused in (lambda: tokenizer.encode(b"a"), lambda: tokenizer.encode_bytes("a")):
        with pytest.raises(TypeError):
            confused()
    with pytest.raises(TypeError, match="got one str"):
        tokenizer.encode_batch("ab")


@everything
def test_a_lone_surrogate_is_named_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"character 2 .* '\\ud800'"):
        tokenizer.encode("ab\ud800")


def test_each_method_has_its_own_state_only() -> None:
    with pytest.raises(RuntimeError, match="merge_rules"):
        _ = Tokenizer("a").merge_rules
    with pytest.raises(RuntimeError, match="vocabulary_bytes"):
        _ = Tokenizer("a", method="bpe").vocabulary_bytes


@everything
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_tokenizer_cannot_be_copied_or_pickled(tokenizer: Tokenizer, duplicate: Callable) -> None:
    with pytest.raises(TypeError, match="from_spec"):
        duplicate(tokenizer)


@pytest.mark.parametrize("method", ["byte", "bpe"])
def test_a_closed_tokenizer_refuses_every_use(method: str) -> None:
    with Tokenizer("aaab", method=method) as tokenizer:
        assert tokenizer.encode("") == []
    tokenizer.close()
    uses: list[Callable] = [
        lambda: tokenizer.spec,
        lambda: tokenizer.method,
        lambda: tokenizer.vocab_size,
        lambda: tokenizer.vocabulary,
        lambda: tokenizer.vocabulary_bytes,
        lambda: tokenizer.merge_rules,
        lambda: tokenizer.encode(""),
        lambda: tokenizer.encode_bytes(b""),
        lambda: tokenizer.encode_batch([""]),
        lambda: tokenizer.decode([]),
        lambda: tokenizer.decode_bytes([]),
        lambda: tokenizer.__enter__(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert repr(tokenizer) == "Tokenizer(closed)"


def test_repr_says_method_and_size() -> None:
    assert repr(Tokenizer("ab")) == "Tokenizer(method='byte', vocab_size=2)"


def test_threads_that_share_a_tokenizer_agree() -> None:
    tokenizer = Tokenizer(CORPUS, method="bpe", vocabulary_size=330)
    texts = [CORPUS[start:] for start in range(40)]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(tokenizer.encode, texts))
    assert parallel == tokenizer.encode_batch(texts)


_FIT_AND_ENCODE = """
import hashlib, sys
from riftco.tokenizer import Tokenizer
tokenizer = Tokenizer(sys.argv[1] * 40, method="bpe", vocabulary_size=400)
state = repr((tokenizer.merge_rules, tokenizer.encode(sys.argv[1] * 40)))
print(hashlib.sha256(state.encode()).hexdigest())
"""


def _run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True, timeout=60
    )


def test_hash_seed_and_thread_count_do_not_change_the_result() -> None:
    surroundings = [
        {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads}
        for seed, threads in (("0", "1"), ("1234", "4"))
    ]
    digests = {_run(_FIT_AND_ENCODE, CORPUS, **variables).stdout for variables in surroundings}
    assert len(digests) == 1


_FORK_AFTER_ENCODING = """
import os
from riftco.tokenizer import Tokenizer
tokenizer = Tokenizer("the river runs " * 500, method="bpe")
texts = ["the river " * 300] * 8
threads = len(os.listdir("/proc/self/task"))
before = tokenizer.encode_batch(texts)
assert len(os.listdir("/proc/self/task")) == threads
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode_batch(texts) == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_encoding_starts_no_threads_so_a_later_fork_is_safe_and_silent() -> None:
    result = _run(_FORK_AFTER_ENCODING, RAYON_NUM_THREADS="4")
    assert result.stdout + result.stderr == ""


def test_importing_the_package_loads_neither_the_library_nor_torch() -> None:
    script = "import sys, riftco.tokenizer; print({'tokenizers', 'torch'} & set(sys.modules))"
    assert _run(script).stdout.strip() == "set()"
