"""OutputNoise, and the progress of a measurement."""

import io
import re

import numpy as np
import pytest

import detent.sensitivity as qs
from detent.errors import RangeError, UnsupportedError
from detent.observers.passes import reporter
from detent.sensitivity.bench import OutputNoise
from detent.sensitivity.layer_noise import OVERFLOW_NOISE


def arrays(*values):
    return [np.array(each, np.float32) for each in values]


def test_noise_is_summed_over_batches_before_it_is_divided():
    output_noise = OutputNoise(["y"], [arrays([1.0]), arrays([3.0])])
    assert output_noise.noise([arrays([2.0]), arrays([3.0])]) == pytest.approx(1 / 10)


def test_outputs_without_a_signal_are_left_out():
    output_noise = OutputNoise(["y", "zero"], [arrays([2.0], [0.0])])
    assert output_noise.noise([arrays([1.0], [5.0])]) == pytest.approx(0.25)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38], ids=["inf", "-inf", "nan", "huge"])
def test_outputs_that_overflow_have_a_finite_noise(value):
    noise = OutputNoise(["y"], [arrays([1e-3])]).noise([arrays([value])])
    assert noise == OVERFLOW_NOISE
    assert np.isfinite(qs.sqnr_of(noise))


def test_halves_are_compared_in_double_precision():
    old, new = np.array([60000], np.float16), np.array([-60000], np.float16)
    assert OutputNoise(["y"], [[old]]).noise([[new]]) == pytest.approx(4)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_references_must_be_finite(value):
    with pytest.raises(RangeError, match="output 'y'"):
        OutputNoise(["y"], [arrays([1.0, value])])


def test_there_must_be_an_output():
    with pytest.raises(UnsupportedError, match="no float output, but"):
        OutputNoise([], [[]])


def test_outputs_that_change_their_shape_are_left_out_for_that_batch():
    output_noise = OutputNoise(["y", "z"], [arrays([2.0], [1.0]), arrays([4.0], [1.0])])
    changed = [arrays([2.0, 1.0], [1.0]), arrays([3.0], [1.0])]
    assert output_noise.noise(changed) == pytest.approx(1 / 16 / 2)


def test_noise_is_as_large_as_the_signal_if_every_shape_changes():
    assert OutputNoise(["y"], [arrays([0.1]), arrays([0.3])]).noise([arrays([0.1, 2.0]), arrays([])]) == 1.0


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("progress", "stream", "drawn"),
    [(None, Terminal, True), (True, Terminal, True), (False, Terminal, False), (True, io.StringIO, False)],
    ids=["default", "yes", "no", "no terminal"],
)
def test_a_bar_is_drawn_on_terminals(monkeypatch, progress, stream, drawn):
    shown = stream()
    monkeypatch.setattr("sys.stderr", shown)
    report = reporter(progress, "measuring", "runs")
    for done in (1, 2):
        report(done, 2)
    text = re.sub(r", [0-9.]+/s", "", shown.getvalue())
    expected = "\rmeasuring [############............] 1/2 runs\rmeasuring [########################] 2/2 runs\n"
    assert text == (expected if drawn else "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s or less"), (8.4, "8 s"), (300.0, "5 min")], ids=["short", "seconds", "minutes"]
)
def test_costs_as_text(seconds, text):
    assert str(qs.Cost(1, 2, 2, 32, seconds)).endswith(f"2 runs over 32 samples, about {text}")


def test_costs_in_the_singular():
    assert str(qs.Cost(1, 1, 1, 1, 5.0)) == "1 layer, 1 candidate: 1 run over 1 sample, about 5 s"
