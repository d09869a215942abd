"""Sensitivity and Mix as values: invariants, choices, recipes, untrusted JSON."""

import copy
import dataclasses
import json
import pickle

import pytest

import detent as dt
import detent.sensitivity as qs
from detent.errors import FileFormatError, SpecError
from detent.recipe import exact_pattern
from detent.rule import Layer
from detent.sensitivity.bench import as_widths, weight_nbytes
from tests.tools.recording_axes import RecordingAxes

FOUR, EIGHT = "int4/axis0", "int8/axis0"
NASTY = [
    "plain.0",
    "a*",
    "a[0]",
    "[ab]",
    "what?",
    "@first",
    "@last",
    "re:x",
    "re:",
    "",
    "!x",
    "a\nb",
    "x]",
    "/m/Conv_1",
]


def layer(name, quiet=1.0, tied=()):
    return qs.LayerNoise(name, "Conv", 10, 40, {FOUR: 0.01 * quiet, EIGHT: 1e-4 * quiet}, {FOUR: 9, EIGHT: 14}, tied)


@pytest.fixture
def sensitivity():
    return qs.Sensitivity((layer("a"), layer("b", 10.0, ("c",))), (FOUR, EIGHT))


@pytest.mark.parametrize(
    "changed",
    [
        {"noise": {}, "nbytes": {}},
        {"noise": {FOUR: 0.1}, "nbytes": {EIGHT: 3}},
        {"noise": {FOUR: -0.1}, "nbytes": {FOUR: 3}},
        {"noise": {FOUR: float("nan")}, "nbytes": {FOUR: 3}},
        {"noise": {FOUR: float("inf")}, "nbytes": {FOUR: 3}},
        {"noise": {FOUR: 1e31}, "nbytes": {FOUR: 3}},
        {"noise": {FOUR: True}, "nbytes": {FOUR: 3}},
        {"noise": {FOUR: 0.1}, "nbytes": {FOUR: -3}},
        {"noise": {FOUR: 0.1}, "nbytes": {FOUR: 3.5}},
        {"elements": -1},
        {"name": 3},
    ],
    ids=["nothing", "keys", "negative", "nan", "inf", "huge", "bool", "bytes", "fraction", "elements", "name"],
)
def test_layers_that_cannot_be(changed):
    about = {
        "name": "a",
        "type": "Conv",
        "elements": 1,
        "nbytes_float": 4,
        "noise": {FOUR: 0.1},
        "nbytes": {FOUR: 3},
    }
    qs.LayerNoise(**about)
    with pytest.raises(SpecError):
        qs.LayerNoise(**about | changed)


@pytest.mark.parametrize(
    "layers",
    [(), (layer("a"), layer("a")), (layer("a"), layer("b", tied=("a",)))],
    ids=["none", "twice", "tied twice"],
)
def test_sensitivities_that_cannot_be(layers):
    with pytest.raises(SpecError):
        qs.Sensitivity(layers, (FOUR, EIGHT))


@pytest.mark.parametrize("kind", ["option", "float"])
def test_more_bytes_than_can_be_added_are_rejected(kind):
    most = 1 << 62
    nbytes, nbytes_float = (most // 2, 4) if kind == "option" else (3, most // 2)
    layers = [qs.LayerNoise(name, "Conv", 1, nbytes_float, {FOUR: 0.1}, {FOUR: nbytes}) for name in "abc"]
    mix = qs.Sensitivity(layers[:2], (FOUR,)).choose(most, keep_float=True)
    assert mix.nbytes in {6, 8, most, most // 2 + 4}
    with pytest.raises(SpecError, match=f"{3 * (most // 2):,} bytes"):
        qs.Sensitivity(layers, (FOUR,))


def test_unlisted_candidate_is_rejected():
    with pytest.raises(SpecError, match="expected one of"):
        qs.Sensitivity((layer("a"),), (FOUR,))


def test_values_can_be_copied(sensitivity):
    mix = sensitivity.choose(100)
    for value in (sensitivity, mix):
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(TypeError):
        mix.options["a"] = FOUR
    with pytest.raises(TypeError):
        sensitivity.layers[0].noise[FOUR] = 0.0


def test_values_can_be_kept_in_sets(sensitivity):
    mix = sensitivity.choose(100)
    for value in (sensitivity, mix, mix.with_measured(18.5), *sensitivity.layers):
        assert len({value, copy.deepcopy(value)}) == 1
    other = qs.LayerNoise(
        "a", "Conv", 10, 40, dict(reversed(sensitivity.layers[0].noise.items())), dict(sensitivity.layers[0].nbytes)
    )
    assert other == sensitivity.layers[0]
    assert hash(other) == hash(sensitivity.layers[0])
    assert len({mix, mix.with_measured(18.5), sensitivity.choose(18)}) == 3


def test_noise_becomes_decibels():
    assert qs.sqnr_of(0.01) == pytest.approx(20)
    assert qs.sqnr_of(0.0) == float("inf")


def test_layers_are_ranked_worst_first(sensitivity):
    assert [each.name for each in sensitivity.ranked()] == ["b", "a"]
    assert [each.name for each in sensitivity.ranked(EIGHT)] == ["b", "a"]
    with pytest.raises(SpecError, match="int9"):
        sensitivity.ranked("int9/axis0")


def test_choices_fit_and_are_best(sensitivity):
    assert dict(sensitivity.choose(23).options) == {"a": FOUR, "b": EIGHT}
    assert dict(sensitivity.choose(22).options) == {"a": FOUR, "b": FOUR}
    assert sensitivity.choose(28).nbytes == 28
    assert sensitivity.choose(23).predicted_sqnr_db == pytest.approx(qs.sqnr_of(0.011))


@pytest.mark.parametrize("budget", [2**63, 10**30], ids=["63 bits", "10**30"])
def test_budgets_may_be_larger_than_any_choice(sensitivity, budget):
    assert sensitivity.choose(budget).nbytes == 28


def test_the_error_for_a_small_budget_has_the_smallest_size(sensitivity):
    with pytest.raises(SpecError, match="no allocation fits 17 bytes; the smallest needs 18: raise the budget"):
        sensitivity.choose(17)


def test_layers_may_stay_float_when_asked(sensitivity):
    assert dict(sensitivity.choose(10**6).options) == {"a": EIGHT, "b": EIGHT}
    mix = sensitivity.choose(10**6, keep_float=True)
    assert dict(mix.options) == {"a": "float", "b": "float"}
    assert mix.predicted_sqnr_db == float("inf")
    assert mix.recipe.rules == ()
    assert dict(sensitivity.choose(54, keep_float=True).options) == {"a": EIGHT, "b": "float"}


def test_uniform_and_mixed_options(sensitivity):
    assert sensitivity.uniform(FOUR).nbytes == 18
    with pytest.raises(SpecError, match="was not measured with"):
        sensitivity.uniform("int5/axis0")
    with pytest.raises(SpecError, match="expected one for every layer"):
        sensitivity.mixed({"a": FOUR})


def test_the_curve_goes_from_the_smallest_to_the_largest(sensitivity):
    points = sensitivity.curve()
    assert [nbytes for nbytes, _ in points] == [18, 23, 28]
    assert [sqnr for _, sqnr in points] == sorted(sqnr for _, sqnr in points)


def test_one_sample_in_the_singular(sensitivity):
    assert "2 layers, 1 sample. Each row" in str(dataclasses.replace(sensitivity, samples=1))


def test_a_mix_is_a_table_with_both_values(sensitivity):
    mix = sensitivity.choose(23)
    assert "dB predicted, not measured" in str(mix)
    assert "SQNR 19.6 dB predicted, 18.5 dB measured" in str(mix.with_measured(18.5))
    assert mix.measured_sqnr_db is None
    with pytest.raises(SpecError, match="NaN"):
        mix.with_measured(float("nan"))


def test_reprs_are_short(sensitivity):
    assert repr(sensitivity) == "<Sensitivity: 2 layers, 2 candidates (int4/axis0, int8/axis0), 32 samples>"
    assert repr(sensitivity.layers[0]).startswith("<LayerNoise 'a': Conv, 10 elements, noise int4/axis0: ")
    text = repr(sensitivity.choose(23))
    assert text == "<Mix: 2 layers in 23 bytes of weights; SQNR 19.6 dB predicted, not measured>"
    labels = [f"int{bits}/axis0" for bits in range(2, 9)]
    many = qs.LayerNoise("c", "Conv", 1, 4, dict.fromkeys(labels, 0.1), dict.fromkeys(labels, 1))
    assert "7 candidates (int2/axis0, int3/axis0, int4/axis0, int5/axis0, ...)" in repr(qs.Sensitivity((many,), labels))


def test_notebooks_show_tables_with_escaped_names(sensitivity):
    text = sensitivity._repr_html_()
    assert text.count("<tr>") == 5  # head, two layers, all, bytes
    assert text.endswith("assuming that their noise adds.</div>")
    named = qs.Sensitivity((layer("<script>alert(1)</script>"),), (FOUR, EIGHT))
    for html in (named._repr_html_(), named.choose(100)._repr_html_()):
        assert "<script" not in html
        assert "&lt;script&gt;alert(1)" in html


def test_plot_has_a_point_for_each_layer_and_candidate_with_noise():
    quiet = qs.LayerNoise("a", "Conv", 10, 40, {FOUR: 0.001, EIGHT: 0.0}, {FOUR: 9, EIGHT: 14})
    loud = qs.LayerNoise("b", "Conv", 10, 40, {FOUR: 0.1}, {FOUR: 9})
    ax = RecordingAxes()
    assert qs.Sensitivity((quiet, loud), (FOUR, EIGHT)).plot(ax) is ax
    calls = {(method, kwargs.get("label")): args for method, args, kwargs in ax.calls}
    assert calls["set_yticks", None][1] == ["b", "a"]  # the most sensitive layer on top
    assert calls["plot", FOUR][:2] == (pytest.approx([10.0, 30.0]), [0, 1])
    assert calls["plot", EIGHT][:2] == ([], [])


def test_plot_draws_with_matplotlib(sensitivity):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ax = sensitivity.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a"]
    assert len(ax.lines) == 2
    assert sensitivity.plot(ax=ax) is ax
    matplotlib.pyplot.close(ax.figure)


@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_rules_match_one_name_and_no_other(name):
    recipe = qs.Sensitivity((layer(name),), (FOUR, EIGHT)).choose(100).recipe
    assert dt.Recipe.from_json(recipe.to_json()) == recipe
    others = [*NASTY, f"{name}x", f"x{name}", "a0", "ax", "first"]
    matched = [each for each in dict.fromkeys(others) if recipe.rules[0].matches(Layer(each, (), True, True))]
    assert matched == [name]
    assert dt.Rule(exact_pattern(name), skip=True).match


def test_tied_layers_get_one_rule_each(sensitivity):
    recipe = sensitivity.choose(23).recipe
    assert [(rule.match, str(rule.weight.format.name)) for rule in recipe.rules] == [
        ("a", "int4"),
        ("b", "int8"),
        ("c", "int8"),
    ]


def test_a_measured_recipe_is_given_back_layer_by_layer():
    given = dt.Recipe([dt.Rule("a", weight=EIGHT, input="uint8/tensor/affine"), dt.Rule("b", weight=FOUR)], "w8a8")
    layers = tuple(qs.LayerNoise(name, "Conv", 10, 40, {"w8a8": 0.1}, {"w8a8": 14}) for name in "ab")
    sensitivity = qs.Sensitivity(layers, ("w8a8",), given)
    assert sensitivity.choose(28).recipe.rules == given.rules
    assert dict(sensitivity.choose(60, keep_float=True).options) in (
        {"a": "float", "b": "w8a8"},
        {"a": "w8a8", "b": "float"},
    )
    with pytest.raises(SpecError, match="no rule for layer 'b'"):
        qs.Sensitivity(layers, ("w8a8",), dt.Recipe(given.rules[:1]))
    assert qs.Sensitivity.from_json(sensitivity.to_json()) == sensitivity


# JSON


def test_json_goes_round(sensitivity):
    assert qs.Sensitivity.from_json(sensitivity.to_json()) == sensitivity


def changed(sensitivity, path, value):
    data = json.loads(sensitivity.to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("version",), True),
        (("version",), KeyError),
        (("extra",), 1),
        (("options",), "int4/axis0"),
        (("options",), [4]),
        (("options",), ["x"] * 100),
        (("options",), [FOUR]),
        (("samples",), 0),
        (("samples",), 1.5),
        (("samples",), 10**30),
        (("storage",), "zip"),
        (("storage",), None),
        (("target",), 3),
        (("recipe",), "w8a8"),
        (("recipe",), {"version": 1}),
        (("layers",), []),
        (("layers",), {}),
        (("layers", 0), 3),
        (("layers", 0, "name"), KeyError),
        (("layers", 0, "name"), 5),
        (("layers", 0, "name"), "b"),
        (("layers", 0, "elements"), -1),
        (("layers", 0, "elements"), 1e9),
        (("layers", 0, "nbytes_float"), 10**40),
        (("layers", 0, "tied"), "x"),
        (("layers", 0, "tied"), [1]),
        (("layers", 0, "options"), {}),
        (("layers", 0, "options"), [0.1, 3]),
        (("layers", 0, "options", FOUR), 0.1),
        (("layers", 0, "options", FOUR), [0.1, 3, 4]),
        (("layers", 0, "options", FOUR), ["0.1", 3]),
        (("layers", 0, "options", FOUR), [-0.1, 3]),
        (("layers", 0, "options", FOUR), [True, 3]),
        (("layers", 0, "options", FOUR), [10**400, 3]),
        (("layers", 0, "options", FOUR), [1e308, 3]),
        (("layers", 0, "options", FOUR), [0.1, 1 << 62]),
        (("layers", 0, "nbytes_float"), 1 << 62),
        (("layers", 0, "options", FOUR), [0.1, -3]),
        (("layers", 0, "options", FOUR), [0.1, 3.0]),
        (("layers", 0, "options", FOUR), [float("nan"), 3]),
        (("layers", 0, "options", FOUR), [float("inf"), 3]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_json_is_not_trusted(sensitivity, path, value):
    with pytest.raises(FileFormatError):
        qs.Sensitivity.from_json(changed(sensitivity, path, value))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"version": 1, "version": 1}', "null", b"{}", 3],
    ids=["empty", "open", "deep", "twice", "null", "bytes", "number"],
)
def test_malformed_text_is_rejected(text):
    with pytest.raises(FileFormatError):
        qs.Sensitivity.from_json(text)


# Candidates


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([3, 8], ["int3/axis0", "int8/axis0"]),
        (iter([4]), ["int4/axis0"]),
        (["int4/group32", 4, "int8"], ["int4/group32", "int4/axis0", "int8/tensor"]),
    ],
    ids=["bits", "iterator", "specs"],
)
def test_widths_are_specs(widths, expected):
    assert list(as_widths(widths)) == expected


@pytest.mark.parametrize(
    "widths",
    [[], 4, "int4", [0], [17], [4.0], [True], ["int44"], [4, "int4/axis0"], ["int8/token"], None],
    ids=["none", "int", "text", "zero", "17", "float", "bool", "unknown", "twice", "token", "None"],
)
def test_widths_that_cannot_be(widths):
    with pytest.raises(SpecError):
        as_widths(widths)


@pytest.mark.parametrize("bits", range(1, 17))
def test_packed_bytes_are_those_of_tensors(bits):
    import numpy as np

    weight = np.random.default_rng(bits).normal(size=(7, 33)).astype(np.float32)
    for text in (f"int{bits}/axis0", f"int{bits}/tensor", f"uint{bits}/axis0/affine"):
        if text == "int1/tensor" or text.startswith("int1"):
            continue
        tensor = dt.quantize(weight, dt.QuantParams.from_data(text, weight))
        assert weight_nbytes(tensor.spec, weight.shape, "packed", "MatMul") == tensor.nbytes
