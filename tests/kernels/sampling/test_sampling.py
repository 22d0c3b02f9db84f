"""The draw against the contract written out in Python, cut by cut, and against what must never come out."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.dispatch import use
from kernels.sampling import cpu, greedy, reference, sample, triton_sample
from tests.kernels.lab import sanitize

FIXTURES = json.loads((Path(__file__).parents[2] / "fixtures/sampler.json").read_text())
NATIVE = pytest.param("native", marks=pytest.mark.skipif(not cpu.built, reason="not built"))
EXACT = ["torch", NATIVE]
ALL = [*EXACT, "triton"]


def draw(implementation: str, logits: Tensor, **settings) -> tuple[list[int], Tensor]:
    if implementation == "triton":
        with sanitize(), use("triton"):
            ids, logprobs = sample(logits, **settings)
    else:
        with use(implementation):  # type: ignore[arg-type]
            ids, logprobs = sample(logits, **settings)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    return ids.tolist(), logprobs


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def randoms(rows: int, vocabulary: int, seed: int, step: float = 0.0) -> Tensor:
    """Logits; multiples of `step`, so that many are equal, if it is given."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / step).round() * step if step else logits


def uniforms(rows: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize("case", FIXTURES, ids=lambda case: str(case["temperature"]))
def test_it_draws_the_tokens_of_the_contract(implementation: str, case: dict) -> None:
    rng = Random(case["seed"])
    given = {"temperature": case["temperature"], "top_k": case["top_k"]}
    drawn = doubles(*(rng.random() for _ in case["tokens"]))
    logits = torch.tensor(case["logits"], dtype=torch.float64).expand(len(drawn), -1)
    assert draw(implementation, logits, uniforms=drawn, **given)[0] == case["tokens"]
    greedy = draw(implementation, logits, uniforms=drawn, temperature=0)[0]
    assert greedy == [case["greedy"]] * len(drawn)


def ranked_weights(logits: Tensor, temperature: float) -> list[tuple[int, float]]:
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return [(i, math.exp((values[i] - values[order[0]]) / temperature)) for i in order]


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 257, 1031])
def test_every_cut_is_as_defined(implementation: str, vocabulary: int) -> None:
    rows = 12
    logits, drawn = randoms(rows, vocabulary, vocabulary, 0.5 * (vocabulary % 2)), uniforms(rows, vocabulary)
    generator = torch.Generator().manual_seed(vocabulary)
    top_k = torch.randint(1, vocabulary + 1, (rows,), generator=generator)
    temperature, top_p, min_p = torch.rand(3, rows, dtype=torch.float64, generator=generator) + doubles(0.2)
    top_p, min_p = top_p.clamp(max=1), min_p * 0.1
    expected = []
    for i in range(rows):
        kept = ranked_weights(logits[i].double(), float(temperature[i]))[: int(top_k[i])]
        target, cumulative, nucleus = float(top_p[i]) * math.fsum(w for _, w in kept), 0.0, []
        for item in kept:
            nucleus.append(item)
            cumulative += item[1]
            if top_p[i] < 1 and cumulative >= target:
                break
        kept = [item for item in nucleus if item[1] >= min_p[i]]
        threshold, cumulative, chosen = float(drawn[i]) * math.fsum(w for _, w in kept), 0.0, kept[-1][0]
        for token, weight in kept:
            cumulative += weight
            if threshold < cumulative:
                chosen = token
                break
        expected.append(chosen)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids, logprobs = draw(implementation, logits, uniforms=drawn, **settings)
    assert ids == expected
    exact = logits.double().log_softmax(-1)[range(rows), ids]
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=2e-7)


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.parametrize("step", [0.0, 1.0, 100.0])
def test_a_small_top_k_of_a_large_vocabulary_is_found_without_sorting(step: float) -> None:
    for vocabulary in (511, 512, 513, 3000):
        logits, drawn = randoms(3, vocabulary, vocabulary, step), doubles(0.01, 0.6, 0.999)
        logits[1] = logits[1].sort(descending=True).values
        logits[2] = logits[2].sort().values
        for top_k in (1, 2, 31, vocabulary // 16):
            expected = draw("torch", logits, uniforms=drawn, top_k=top_k, temperature=5.0)
            assert draw("native", logits, uniforms=drawn, top_k=top_k, temperature=5.0)[0] == expected[0]


@pytest.mark.parametrize("implementation", EXACT)
def test_a_uniform_at_a_boundary_falls_where_exact_arithmetic_puts_it(implementation: str) -> None:
    for seed in range(6):
        logits = randoms(1, 300, seed)
        weights = [w for _, w in ranked_weights(logits[0].double(), 0.7)]
        total, cumulative = math.fsum(weights), 0.0
        drawn = []
        for weight in weights[:40]:
            cumulative += weight
            drawn += [
                math.nextafter(cumulative / total, 0),
                cumulative / total,
                math.nextafter(cumulative / total, 1),
            ]
        given = doubles(*drawn)
        rows = logits.expand(len(drawn), -1)
        with use("torch"):
            expected = sample(rows, uniforms=given, temperature=0.7)[0].tolist()
        assert draw(implementation, rows, uniforms=given, temperature=0.7)[0] == expected
        assert len(set(expected)) >= 40


@pytest.mark.skipif(not cpu.built, reason="not built")
def test_the_native_sum_of_weights_is_exactly_rounded() -> None:
    """A difference in the last bit of the sum moves one of these thresholds over its boundary."""
    for seed in range(9):
        logits = randoms(1, 300, seed, 0.01).double() * 40 ** (seed % 3)
        weights = [w for _, w in ranked_weights(logits[0], 1.0)]
        total, cumulative = math.fsum(weights), 0.0
        for weight in weights[:12]:
            cumulative += weight
            uniform = cumulative / total
            while uniform * total < cumulative:
                uniform = math.nextafter(uniform, 1)
            while uniform * total >= cumulative:
                uniform = math.nextafter(uniform, 0)
            if uniform >= 1:
                continue
            pair = doubles(uniform, math.nextafter(uniform, 1)).clamp(max=1 - 2.0**-53)
            with use("torch"):
                expected = sample(logits.expand(2, -1), uniforms=pair)[0].tolist()
            assert sample(logits.expand(2, -1), uniforms=pair)[0].tolist() == expected


@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        (50, {}),
        (17, {"top_k": 5, "temperature": 0.5}),
        (50, {"top_p": 0.5}),
        (40, {"min_p": 0.2, "top_k": 30}),
        (1100, {"top_k": 200, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5}),
        (30, {"temperature": 0}),
    ],
    ids=str,
)
def test_triton_draws_what_the_contract_draws(vocabulary: int, settings: dict) -> None:
    logits = randoms(3, vocabulary, 7, 0.5 if settings else 0.0)
    check_triton(logits, uniforms=doubles(0.05, 0.5, 0.97), **settings)


def check_triton(logits: Tensor, **settings) -> None:
    expected = draw("torch", logits, **settings)
    ids, logprobs = draw("triton", logits, **settings)
    assert ids == expected[0]
    torch.testing.assert_close(logprobs, expected[1], atol=2e-6, rtol=1e-6)


def test_triton_walks_a_row_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sample, "BLOCK", 16)
    equal = torch.zeros(1, 40)
    check_triton(equal, uniforms=doubles(0.99), top_k=38)
    check_triton(equal, uniforms=doubles(0.99), top_p=0.46)
    check_triton(randoms(1, 40, 0), uniforms=doubles(0.9), temperature=3.0)
    check_triton(randoms(1, 40, 0, 1.0), uniforms=doubles(0.9), temperature=3.0, top_p=0.5, min_p=0.1)
    check_triton(randoms(1, 40, 0, 1.0), uniforms=doubles(0.9), top_k=9, min_p=1.0)
    check_triton(randoms(2, 40, 0)[:, ::2], uniforms=doubles(0.9, 0.1), temperature=3.0)
    with pytest.raises(ValueError, match="row 0 has logits that are not finite"):
        draw("triton", equal.index_fill(1, torch.tensor(3), math.nan), uniforms=doubles(0.5))


def test_triton_reads_strided_bf16_between_poison_and_keeps_every_cut_apart() -> None:
    rows, vocabulary = 7, 21
    storage = torch.full((rows + 2, 2 * vocabulary + 9), math.nan, dtype=torch.bfloat16)
    logits = storage[1:-1, 5 : 5 + 2 * vocabulary : 2]
    logits.copy_(randoms(rows, vocabulary, 3, 0.5))
    before = storage.clone()
    settings = {
        "temperature": doubles(1, 0, 2, 0.5, 1, 1, 1e-60),
        "top_k": torch.tensor([vocabulary, vocabulary, 3, vocabulary, 4, vocabulary, vocabulary]),
        "top_p": doubles(1, 1, 1, 0.6, 0.6, 1, 1),
        "min_p": doubles(0, 0, 0, 0, 0.3, 0.3, 0),
    }
    check_triton(logits, uniforms=uniforms(rows, 5), **settings)
    counts = torch.zeros(rows, vocabulary, dtype=torch.int64)  # a second tensor, of other strides
    check_triton(logits, uniforms=uniforms(rows, 5), counts=counts, **settings)
    assert torch.equal(storage.view(torch.int16), before.view(torch.int16))


def test_triton_walks_equal_logits_in_the_order_of_ids() -> None:
    cut_among_equals = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    assert draw("triton", cut_among_equals, uniforms=doubles(0.99), top_k=3)[0] == [0]
    logits = torch.zeros(1, 8).expand(8, -1)
    drawn = doubles(0.01, 0.55, 0.99, 0.4, 0.6, 0.99, 0.4, 0.99)
    cuts = {"top_k": torch.tensor([8, 8, 8, 2, 2, 2, 8, 8]), "top_p": doubles(*[1] * 6, *[0.375] * 2)}
    assert draw("triton", logits, uniforms=drawn, **cuts)[0] == [0, 4, 7, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("implementation", ALL)
def test_reaching_top_p_exactly_is_enough(implementation: str) -> None:
    logits = torch.tensor([[-0.6931472, 0.0, -0.6931472]])  # weights 0.5, 1, 0.5
    assert draw(implementation, logits, uniforms=doubles(0.95), top_p=0.5)[0] == [1]


@pytest.mark.parametrize("implementation", ALL)
def test_penalties_are_those_of_openai_and_vllm(implementation: str) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.5]] * 6)
    counts = torch.tensor([[0] * 4, [1, 0, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4, [0, 0, 3, 0]])
    prompt = torch.zeros(6, 4, dtype=torch.bool)
    prompt[3:5, 0] = True
    settings = {
        "presence_penalty": doubles(5, 0.2, 0, 5, 0, -9),
        "frequency_penalty": doubles(5, 0, 0.06, 5, 0, 0),
        "repetition_penalty": doubles(9, 1, 1, 1, 1.1, 2),
    }
    # A prompt counts for repetition alone; a negative logit is multiplied: -1 * 2 + 9 = 7.
    ids, logprobs = draw(
        implementation, logits, uniforms=uniforms(6), temperature=0, counts=counts, prompt=prompt, **settings
    )
    assert ids == [0, 1, 1, 0, 1, 2]
    raw = logits.log_softmax(-1)[range(6), ids]
    torch.testing.assert_close(logprobs, raw, atol=1e-6, rtol=0)  # of the logits as given


@pytest.mark.skipif(not cpu.built, reason="not built")
def test_native_penalties_are_bit_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 40, 90
    settings = {
        "presence_penalty": torch.randn(rows, generator=generator),
        "frequency_penalty": torch.randn(rows, generator=generator),
        "repetition_penalty": torch.rand(rows, generator=generator) + 0.6,
        "counts": torch.randint(0, 3, (rows, vocabulary), generator=generator, dtype=torch.int32),
        "prompt": torch.rand(rows, vocabulary, generator=generator) < 0.3,
        "top_p": 0.9,
    }
    logits, drawn = randoms(rows, vocabulary, 1, 0.25), uniforms(rows)
    expected = draw("torch", logits, uniforms=drawn, **settings)
    assert draw("native", logits, uniforms=drawn, **settings)[0] == expected[0]


@pytest.mark.parametrize("implementation", ALL)
def test_extremes_never_give_an_id_outside_the_vocabulary(implementation: str) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.stack(
        [
            torch.full((6,), -largest).index_fill(0, torch.tensor(4), largest),  # one-hot
            torch.zeros(6),
            torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 0.0]),
            torch.tensor([-0.0, 0.0, -0.0, -1.0, 0.0, -5.0]),
            torch.full((6,), largest),
            torch.full((6,), -largest),
        ]
    )
    greedy, logprobs = draw(implementation, logits, uniforms=uniforms(6), temperature=0)
    assert greedy == [4, 0, 1, 0, 0, 0]
    assert logprobs.isfinite().all()
    for temperature, top_p, drawn in ((1e-30, 1.0, 1 - 2.0**-53), (1e30, 1e-9, 0.5)):
        ids, logprobs = draw(
            implementation, logits, uniforms=doubles(*[drawn] * 6), temperature=temperature, top_p=top_p
        )
        assert all(0 <= i < 6 for i in ids)
        assert ids[0] == 4 or temperature == 1e30
        assert logprobs.isfinite().all()
    assert draw(implementation, logits[:1, :1], uniforms=uniforms(1))[0] == [0]


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(("wrong", "place"), [(math.nan, 0), (math.inf, 20), (-math.inf, 39)])
def test_logits_that_are_not_finite_name_their_row(implementation: str, wrong: float, place: int) -> None:
    logits = randoms(3, 40, 0)
    logits[1, place] = wrong
    with pytest.raises(ValueError, match="row 1 has logits that are not finite"):
        draw(implementation, logits, uniforms=uniforms(3), temperature=doubles(1, 0, 1))


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(("logit", "penalty"), [(1e30, 1e-300), (-1e30, 1e300)])
def test_penalties_that_overflow_name_their_row(implementation: str, logit: float, penalty: float) -> None:
    logits, counts = torch.full((2, 3), logit), torch.tensor([[0, 1, 1]] * 2)
    settings = {"counts": counts, "repetition_penalty": doubles(1, penalty)}
    with pytest.raises(ValueError, match="row 1 has logits that are not finite, before or after"):
        draw(implementation, logits, uniforms=uniforms(2), **settings)


@pytest.mark.parametrize("implementation", ALL)
def test_a_row_is_drawn_alone(implementation: str) -> None:
    logits, drawn = randoms(4, 30, 2), uniforms(4)
    together = draw(implementation, logits, uniforms=drawn, top_k=9)
    for i in (2, 0):
        ids, logprobs = draw(implementation, logits[i : i + 1], uniforms=drawn[i : i + 1], top_k=9)
        assert ids == together[0][i : i + 1]
        assert torch.equal(logprobs, together[1][i : i + 1])
    assert draw(implementation, logits[:0], uniforms=drawn[:0])[0] == []


@pytest.mark.skipif(not cpu.built, reason="not built")
def test_the_number_of_threads_changes_nothing() -> None:
    logits, drawn, before = randoms(9, 20000, 2), uniforms(9), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sample(logits, uniforms=drawn, top_p=0.8))
    finally:
        torch.set_num_threads(before)
    for ids, logprobs in results[1:]:
        assert torch.equal(ids, results[0][0])
        assert torch.equal(logprobs, results[0][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "top_k must be 1 to 5, the vocabulary, got 6"),
        ({"top_k": torch.tensor([5, 0])}, "top_k must be 1 to 5, the vocabulary, got 0 for row 1"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0"),
        ({"temperature": doubles(1, math.nan)}, "temperature .* got nan for row 1"),
        ({"temperature": doubles(1, 1, 1)}, r"temperature must be one number or \[2\]"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be finite"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be finite"),
        ({"uniforms": doubles(0, 1)}, r"uniforms must be in \[0, 1\), got 1.0 for row 1"),
        ({"uniforms": doubles(0)}, r"uniforms must be float64 \[2\]"),
        ({"uniforms": torch.zeros(2)}, r"uniforms must be float64 \[2\]"),
        ({"counts": torch.zeros(2, 4, dtype=torch.int64)}, r"counts must be .* \[2, 5\]"),
        ({"counts": torch.zeros(2, 5)}, r"counts must be torch.int32 or torch.int64"),
        ({"prompt": torch.zeros(2, 5, dtype=torch.int64)}, "prompt must be torch.bool"),
        ({"logits": torch.zeros(5)}, "logits must be"),
        ({"logits": torch.zeros(2, 0)}, "logits must be"),
        ({"logits": torch.zeros(2, 5, dtype=torch.float16)}, "logits must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    arguments = {"logits": torch.zeros(2, 5), "uniforms": doubles(0.1, 0.2)} | change
    with pytest.raises(ValueError, match=message):
        sample(arguments.pop("logits"), **arguments)


def test_inputs_are_left_alone_and_layouts_do_not_matter() -> None:
    logits, drawn = randoms(6, 12, 4), uniforms(6)
    expected = sample(logits, uniforms=drawn)[0]
    for layout in (
        logits.T.contiguous().T,
        torch.cat([logits, logits], 1)[:, :12],
        logits.repeat_interleave(2, 1)[:, ::2],
    ):
        before = layout.clone()
        assert torch.equal(sample(layout, uniforms=drawn.repeat_interleave(2)[::2])[0], expected)
        assert torch.equal(layout, before)


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 300])
def test_greedy_is_the_draw_at_temperature_0(
    implementation: str, dtype: torch.dtype, vocabulary: int
) -> None:
    logits = randoms(5, 2 * vocabulary, vocabulary, step=2.0).to(dtype)[
        :, ::2
    ]  # many are equal; not contiguous
    expected, _ = draw("torch", logits, uniforms=uniforms(5), temperature=0.0)
    with use(implementation):  # type: ignore[arg-type]
        ids = greedy(logits)
        assert (ids.dtype, ids.tolist()) == (torch.int64, expected)
        assert greedy(logits[:0]).tolist() == []


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize(("wrong", "place"), [(math.nan, 0), (math.inf, 20), (-math.inf, 39)])
def test_greedy_names_a_row_that_is_not_finite(implementation: str, wrong: float, place: int) -> None:
    logits = randoms(3, 40, 0)
    logits[1, place] = wrong
    with use(implementation), pytest.raises(ValueError, match="row 1 has logits that are not finite"):  # type: ignore[arg-type]
        greedy(logits)


def test_greedy_refuses_what_are_no_logits() -> None:
    for wrong in (torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="logits must be float32"):
            greedy(wrong)


def operands() -> tuple:
    settings = torch.tensor([[1.0, 0.9, 0.0, 1.0, 0.0, 0.0]] * 3, dtype=torch.float64)
    return randoms(3, 10, 0), uniforms(3), torch.tensor([10, 3, 4]), settings, None, None


def test_the_operator_is_sound() -> None:
    torch.library.opcheck(torch.ops.riftco.sample.default, operands())


def test_it_compiles() -> None:
    compiled = torch.compile(torch.ops.riftco.sample.default, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*operands()), torch.ops.riftco.sample(*operands()), strict=True):
        assert torch.equal(actual, expected)


def test_settings_are_in_the_order_that_the_native_code_reads() -> None:
    assert reference.SETTINGS[:3] == ("temperature", "top_p", "min_p")
    assert reference.SETTINGS[3:] == ("repetition_penalty", "presence_penalty", "frequency_penalty")
