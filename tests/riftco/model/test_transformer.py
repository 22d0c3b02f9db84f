"""The forward pass against the original's recorded logits, and what a caller may rely on."""

import pytest
import torch

from artifacts import ModelBundle, ModelConfig
from kernels import cross_entropy
from riftco import ModelRuntime
from riftco.config import AttentionKind
from riftco.model import DecoderOnlyTransformer
from tests.support import FIXTURES, fixture, float32_tensor

BUNDLES = ["byte", "bpe", "bpe-lora-child", "bpe-qlora-child"]


@pytest.mark.parametrize("attention", ["materialized", "flash"])
@pytest.mark.parametrize("name", BUNDLES)
def test_logits_equal_the_originals(name: str, attention: str) -> None:
    reference = fixture(f"{name}.reference.json")
    with ModelRuntime.open(ModelBundle.load(FIXTURES / f"{name}.rift")) as runtime, torch.no_grad():
        runtime.model.attention = attention
        for prompt in reference["prompts"]:
            assert runtime.tokenizer.encode(prompt["text"]) == prompt["token_ids"]
            expected = float32_tensor(prompt["logits_f32le_base64"]).view(prompt["logits_shape"])
            torch.testing.assert_close(
                runtime.model(prompt["logits_token_ids"])[0], expected, atol=1e-4, rtol=0
            )


def test_parameter_names_and_shapes_are_the_configurations(model: DecoderOnlyTransformer) -> None:
    specs = [(spec.name, spec.shape) for spec in model.config.parameter_specs()]
    assert [(name, tuple(p.shape)) for name, p in model.base_parameters().items()] == specs


@pytest.mark.parametrize("attention", ["materialized", "flash"])
def test_documents_of_a_row_are_computed_as_if_alone_however_long_the_row(
    model: DecoderOnlyTransformer, attention: AttentionKind
) -> None:
    model.attention = attention
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 1, 2, 3], [2, 2]]
    starts = [sum(map(len, documents[:i])) for i, document in enumerate(documents) for _ in document]
    row = torch.tensor([[token for document in documents for token in document]])
    together = model(row, document_starts=torch.tensor([starts]))[0]
    apart = torch.cat([model(document)[0] for document in documents])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="document of 8 tokens does not fit the maximum context 7"):
        model(torch.ones(1, 10, dtype=torch.int64), document_starts=torch.tensor([[0, 1] + [2] * 8]))


def test_a_token_never_changes_what_came_before_it(model: DecoderOnlyTransformer) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    changed = ids.clone()
    changed[0, 3] = 9
    before, after = model(ids)[0], model(changed)[0]
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


def test_both_attention_kinds_agree_in_values_and_gradients(model: DecoderOnlyTransformer) -> None:
    ids, targets = torch.randint(0, 11, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    results = []
    for kind in ("materialized", "flash"):
        model.attention = kind
        results.append(_loss_and_gradients(model, ids, targets))
    _assert_close(*results, tolerance=1e-6)


def test_block_checkpointing_gives_the_same_gradients(model: DecoderOnlyTransformer) -> None:
    ids, targets = torch.randint(0, 11, (2, 3, 7), generator=torch.Generator().manual_seed(2))
    plain = _loss_and_gradients(model, ids, targets)
    model.activation_checkpointing = "block"
    _assert_close(plain, _loss_and_gradients(model, ids, targets), tolerance=0)


def _loss_and_gradients(model: DecoderOnlyTransformer, ids: torch.Tensor, targets: torch.Tensor) -> list:
    model.zero_grad()
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.base_parameters().values())]


def _assert_close(left: list, right: list, tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "non-empty"),
        ([0] * 8, "maximum context 7"),
        ([11], "token id 11 is outside the vocabulary of 11"),
        ([-1], "token id -1"),
    ],
)
def test_ids_that_do_not_fit_are_refused(model: DecoderOnlyTransformer, ids: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(ids)


def test_unknown_policies_are_refused(model: DecoderOnlyTransformer) -> None:
    with pytest.raises(ValueError, match="attention must be one of"):
        model.attention = "sparse"
    with pytest.raises(ValueError, match="activation_checkpointing must be one of"):
        model.activation_checkpointing = "all"


class FullCache:
    """A cache that keeps every key and value of a layer and attends by the definition."""

    def __init__(self, config: ModelConfig, fail_at_layer: int | None = None) -> None:
        self.capacity, self.size, self.fail_at_layer = config.maximum_context, 0, fail_at_layer
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.calls: list[str] = []

    def begin(self, count: int = 1) -> None:
        self.count = count
        self.calls.append("begin")

    def append_and_attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer == self.fail_at_layer:
            raise RuntimeError("planted")
        keys = torch.cat([self.keys[layer][:, :, : self.size], k], 2) if self.size else k
        values = torch.cat([self.values[layer][:, :, : self.size], v], 2) if self.size else v
        self.keys[layer], self.values[layer] = keys, values
        hidden = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(self.size + 1)
        scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ values

    def commit(self) -> None:
        self.size += self.count
        self.calls.append("commit")

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 1, 3], [2, 5]])
def test_decoding_in_any_pieces_equals_the_full_forward(
    model: DecoderOnlyTransformer, pieces: list[int]
) -> None:
    ids, cache = torch.tensor([3, 1, 4, 1, 5, 9, 2]), FullCache(model.config)
    decoded = torch.cat([model.decode(piece, cache) for piece in ids.split(pieces)])
    torch.testing.assert_close(decoded, model(ids)[0].detach(), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="8 tokens do not fit the maximum context 7"):
        model.decode([0], cache)


def test_a_failing_layer_aborts_the_transaction(model: DecoderOnlyTransformer) -> None:
    cache = FullCache(model.config, fail_at_layer=1)
    with pytest.raises(RuntimeError, match="planted"):
        model.decode([1, 2], cache)
    assert (cache.calls, cache.size) == (["begin", "abort"], 0)
