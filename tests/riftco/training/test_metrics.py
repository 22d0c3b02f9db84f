"""The lines of a run's log: what goes in comes out, and nothing else is ever in them."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from riftco.training.metrics import TrainingMetric, decode_metrics, encode_metrics, perplexity

losses = st.floats(0, 2000)
optional = st.none() | st.floats(0, 1e6)
metrics = st.builds(
    lambda phase, step, loss, *rest: TrainingMetric(phase, step, loss, perplexity(loss), *rest),
    st.sampled_from(["train", "validation"]),
    st.integers(0, 2**40),
    losses,
    optional,
    optional,
    optional,
    optional,
    st.none() | st.integers(0, 2**40),
)


@given(st.lists(metrics, max_size=5))
def test_metrics_survive_the_log(run: list[TrainingMetric]) -> None:
    assert decode_metrics(encode_metrics(run)) == run


def test_each_metric_is_a_line_of_strict_json() -> None:
    lines = encode_metrics([TrainingMetric("validation", 3, 1000.0, math.inf)]).splitlines()
    assert [json.loads(line)["perplexity"] for line in lines] == [None]


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(0.0) == 1.0
