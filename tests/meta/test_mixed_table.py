"""The mixed-precision tables of docs/benchmarks.md are rendered from the committed results."""

import importlib
import itertools
import json
from pathlib import Path

import pytest

import detent.sensitivity as qs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LEAST_MODELS = 3
WIDTHS = [3, 4, 5, 6, 7, 8]
MIXED = {"a": "int4/axis0", "b": "int8/axis0"}


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_mixed")


@pytest.fixture
def committed(render):
    return json.loads(render.RESULT.read_text(encoding="utf-8"))


def row(**changed):
    return {"bits": 3, "bytes": 1000, "sqnr_db": 10.0, "mix_bytes": 990, "mix_sqnr_db": 12.0} | changed


def test_tables_are_rendered_from_the_committed_results(render, committed):
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.placed(page, render.rendered(committed)) == page, "run benchmarks/render_mixed.py"


def test_results_are_complete(committed):
    for about in committed["models"].values():
        for rows in about["files"].values():
            assert [each["bits"] for each in rows] == WIDTHS


def test_no_file_of_a_mix_is_larger(committed):
    for name, about in committed["models"].items():
        for kind, rows in about["files"].items():
            for each in rows:
                assert each.get("mix_bytes", 0) <= each["bytes"], (name, kind, each["bits"])


@pytest.mark.parametrize("kind", ["packed", "onnx"])
def test_mixes_beat_every_uniform_width_on_three_models(render, committed, kind):
    won = [name for name, about in committed["models"].items() if all(map(render.is_won, about["files"][kind]))]
    assert len(won) >= LEAST_MODELS, won


@pytest.mark.parametrize(
    ("changed", "won"),
    [({}, True), ({"mix_sqnr_db": 10.0}, False), ({"mix_bytes": 1001}, False), ({"mix_bytes": 1000}, True)],
    ids=["better", "equal", "larger", "as large"],
)
def test_winning_is_less_noise_in_no_more_bytes(render, changed, won):
    assert render.is_won(row(**changed)) is won


def test_a_bit_width_without_a_mix_is_marked(render):
    alone = {"bits": 3, "bytes": 1000, "sqnr_db": 10.0}
    assert not render.is_won(alone)
    about = {"files": {"packed": [row()], "onnx": [alone]}, "layers": 2, "samples": 4, "candidates": [], "runs": 8}
    sections = render.rendered({"models": {"a": {**about, "seconds": 1}}})
    assert "| 3 | 10.0 dB in 1.0 kB; no mix fits |" in sections["mixed-onnx"]


def test_settings_are_rendered(render):
    about = {"files": {"packed": [row()], "onnx": [row()]}, "layers": 2, "samples": 4, "candidates": ["x"], "runs": 8}
    later = about | {"held_out_samples": 6, "refine_runs": 9}
    lines = render.rendered({"models": {"a": {**about, "seconds": 1}, "b": {**later, "seconds": 2}}})["mixed-models"]
    assert lines.splitlines()[2:] == ["| a | 2 | 4 | 4 | 1 | 8 | 1 | 24 |", "| b | 2 | 4 | 6 | 1 | 8 | 2 | 9 |"]


def test_a_lost_width_is_not_set_in_bold(render):
    def about(each):
        return {
            "files": {"packed": [each], "onnx": [each]},
            "layers": 2,
            "samples": 4,
            "candidates": [],
            "runs": 8,
            "seconds": 1,
        }

    sections = render.rendered({"models": {"a": about(row()), "b": about(row(mix_sqnr_db=9.0))}})
    assert "| 3 | 10.0 → **12.0** dB in 1.0 → 1.0 kB | 10.0 → 9.0 dB in 1.0 → 1.0 kB |" in sections["mixed-packed"]
    assert "a 1 of 1 (+2.0 to +2.0 dB); b 0 of 1 (-1.0 to -1.0 dB)" in sections["mixed-reading"]


@pytest.fixture
def make_comparison(monkeypatch, tmp_path):
    """Return a comparison whose file sizes depend on the allocation, and whose searches return a given allocation."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("mixed_precision")
    options = {"int4/axis0": (0.1, 50), "int8/axis0": (0.01, 90)}
    noise, nbytes = ({key: each[at] for key, each in options.items()} for at in (0, 1))
    layers = [qs.LayerNoise(name, "Conv", 10, 40, noise, nbytes) for name in "ab"]
    comparison = module.Comparison.__new__(module.Comparison)
    comparison.sensitivity, comparison.runner, comparison.refined = qs.Sensitivity(layers, tuple(options)), None, {}
    calls = itertools.count(1)

    def with_sizes(size_of, searched_mix):
        def write(recipe, directory):
            assert next(calls) < 50, "endless loop"
            target = directory / "file"
            target.write_bytes(bytes(size_of([str(rule.weight.format.name) for rule in recipe.rules])))
            return target

        def search(runner, sensitivity, starts, budget, runs, announce, progress):
            return sensitivity.mixed(starts[0] if runs == 1 else searched_mix).with_measured(1.0)

        monkeypatch.setattr(comparison, "write", write)
        monkeypatch.setattr(module, "search", search)
        return comparison, tmp_path

    return with_sizes


def test_no_mix_fits_where_the_smallest_file_is_too_large(make_comparison):
    comparison, directory = make_comparison(lambda kinds: 1000, MIXED)
    assert comparison.fitting(500, 180, directory) is None


def test_the_chosen_mix_is_taken_where_no_refined_one_fits(make_comparison):
    """Files of mixed precision are too large here, and the search finds no others, even with the smallest budget."""
    comparison, directory = make_comparison(lambda kinds: 1000 if len(set(kinds)) > 1 else 400, MIXED)
    mix = comparison.fitting(500, 180, directory)
    assert dict(mix.options) == {"a": "int8/axis0", "b": "int8/axis0"}
    assert (directory / "file").stat().st_size <= 500
    assert mix.measured_sqnr_db == 1.0


def test_the_refined_mix_is_taken_where_it_fits(make_comparison):
    comparison, directory = make_comparison(lambda kinds: 100 * len(set(kinds)), MIXED)
    assert dict(comparison.fitting(200, 180, directory).options) == MIXED
