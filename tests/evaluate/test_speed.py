"""Two models timed in turn, and random inputs for them."""

import numpy as np
import pytest
from onnx import parser

from detent.errors import SpecError
from detent.evaluate import Timing, random_inputs, time_models

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x, int64[2] i) => (float[N, 3] y) { y = Abs(x) }'
)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (1.0, 1.6, "1.00 ms -> 1.60 ms (1.6x slower, 1 thread, 1,200 runs)"),
        (1.3, 1.0, "1.30 ms -> 1.00 ms (1.3x faster, 1 thread, 1,200 runs)"),
        (1.0, 1.02, "1.00 ms -> 1.02 ms (equally fast, 1 thread, 1,200 runs)"),
        (0.08, 0.04, "80.0 µs -> 40.0 µs (2.0x faster, 1 thread, 1,200 runs)"),
    ],
    ids=["slower", "faster", "equally fast", "short"],
)
def test_times_as_text(first, second, text):
    assert str(Timing(first, second, 1200, 1)) == text


def test_both_models_run_equally_often():
    calls = []
    timing = time_models(
        MODEL, MODEL, [random_inputs(MODEL, {"x": (4, 3)})], repeat=5, progress=lambda *at: calls.append(at)
    )
    assert timing.runs == 5
    assert timing.first_ms > 0 < timing.second_ms
    assert calls == [(i, 5) for i in range(1, 6)]


def test_random_inputs_are_always_the_same_and_fit():
    first, again = random_inputs(MODEL), random_inputs(MODEL)
    assert {name: array.shape for name, array in first.items()} == {"x": (1, 3), "i": (2,)}
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert {*first["i"]} <= {0, 1}
    with pytest.raises(SpecError, match="no input 'z'"):
        random_inputs(MODEL, {"z": (1,)})
    with pytest.raises(SpecError, match="smaller --shape"):
        random_inputs(MODEL, {"x": (1 << 30, 3)})
