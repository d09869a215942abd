"""Recipes: matching, later rules that override earlier ones, presets, unmatched rules, and valid and invalid files."""

import copy
import dataclasses
import json
import pickle
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt
from detent.observers import MSE, BinnedObserver, EMAMinMax, Entropy, MinMax, Percentile
from detent.recipe import PRESETS, Decision, get_recipe
from detent.rule import Layer, ObserverSpec, get_observer_spec

INT8, INT4 = dt.QuantSpec.parse("int8/axis0"), dt.QuantSpec.parse("int4/axis0")
MINE = dataclasses.replace(dt.Convention.onnx, name="mine", division="reciprocal")
LAYERS = [
    Layer("stem.conv", ("Conv2d", "_ConvNd", "Module"), first=True),
    Layer("blocks.0.fc1", ("Linear", "Module")),
    Layer("blocks.1.fc1", ("Linear", "Module")),
    Layer("classifier.head", ("Linear", "Module"), last=True),
]


def custom(g, x, params):
    return g


# Fields of a rule


def test_shorthands_are_normalised_once():
    short = dt.Rule(types="Linear", weight="int8/axis0", mode="ema(0.9)", ste="clipped(value)", observer="mse(2.4)")
    full = dt.Rule(
        types=["Linear", "Linear"], weight=INT8, mode=dt.EMA(0.9), ste=dt.ste.Clipped(on="value"), observer=MSE(2.4)
    )
    assert short == full
    assert hash(short) == hash(full)
    assert (short.types, short.weight, short.mode) == (("Linear",), INT8, dt.EMA(0.9))
    assert (short.ste, short.observer) == (dt.ste.Clipped(on="value"), ObserverSpec("mse", norm=2.4))
    assert dt.Rule(weight=dt.int4).weight == dt.QuantSpec("int4")
    assert dt.Rule() == dt.Rule("*")


def test_rules_and_recipes_are_frozen_values():
    recipe = dt.Recipe.preset("w4a8", observer="percentile(1, 99)")
    for value, field in ((recipe, "rules"), (recipe.rules[0], "match"), (recipe.rules[0].observer, "kind")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, "x")
        for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert again == value
            assert hash(again) == hash(value)
    changed = dataclasses.replace(recipe.rules[0], weight="int2/axis0")
    assert (changed.weight.bits, changed.observer) == (2, recipe.rules[0].observer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dt.Rule(""), "for match, expected text that is not empty"),
        (lambda: dt.Rule(None), "got None"),
        (lambda: dt.Rule("\ud800"), "surrogate"),
        (lambda: dt.Rule("re:("), "not a valid regular expression"),
        (lambda: dt.Rule("re:" + "(" * 10_000), "not a valid regular expression"),
        (lambda: dt.Rule("re:a{99999999999}"), "not a valid regular expression"),
        (lambda: dt.Rule("@frist"), "did you mean '@first'"),
        (lambda: dt.Rule("@x"), r"'\[@\]x'"),
        (lambda: dt.Rule(types=int), "use 'int'"),
        (lambda: dt.Rule(types=[int]), "use 'int'"),
        (lambda: dt.Rule(types=3), "types=3, expected names"),
        (lambda: dt.Rule(types=[""]), "not empty"),
        (lambda: dt.Rule(weight="int44"), "did you mean 'int4'"),
        (lambda: dt.Rule(input=8), "got 8 as spec"),
        (lambda: dt.Rule(mode="emma"), "did you mean 'ema'"),
        (lambda: dt.Rule(mode="ema(2)"), "decay"),
        (lambda: dt.Rule(mode="ema(high)"), "decay"),
        (lambda: dt.Rule(mode="fixed(1)"), "expected no settings"),
        (lambda: dt.Rule(mode="ema(0.1, 0.2)"), "unexpected setting '0.2'"),
        (lambda: dt.Rule(mode="ema(decay=0.1, decay=0.2)"), "unexpected setting"),
        (lambda: dt.Rule(mode="ema" + " " * 300), "unknown scale mode"),
        (lambda: dt.Rule(mode=dt.ScaleMode()), "unknown scale mode"),
        (lambda: dt.Rule(mode=3), "unknown scale mode 3"),
        (lambda: dt.Rule(ste="clipt"), "did you mean 'clipped'"),
        (lambda: dt.Rule(ste="clipped(values)"), "did you mean 'value'"),
        (lambda: dt.Rule(ste=3), "unknown estimator 3"),
        (lambda: dt.Rule(skip="yes"), "skip='yes', expected True or False"),
        (lambda: dt.Rule(skip=True, weight="int8"), "skip=True and a spec for weight"),
        (lambda: dt.Recipe(dt.Rule()), "expected a list"),
        (lambda: dt.Recipe("w8a8"), "Recipe.preset"),
        (lambda: dt.Recipe(["w8a8"]), "rule 0"),
        (lambda: dt.Recipe([], name=3), "got 3 as name of a recipe"),
        (lambda: dt.Recipe([], name="\udfff"), "surrogate"),
        (lambda: get_recipe(3), "preset such as 'w8a8'"),
        (lambda: get_recipe([dt.Rule()]), "preset such as 'w8a8'"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(dt.SpecError, match=words):
        make()


# Observers


@pytest.mark.parametrize(
    ("given_", "text", "make"),
    [
        ("minmax", "minmax", MinMax),
        ("mse", "mse", lambda g: MSE(granularity=g)),
        ("mse(2.4)", "mse(2.4)", lambda g: MSE(2.4, g)),
        ("mse( 3 )", "mse(3.0)", lambda g: MSE(3, g)),
        ("mse(precision=7)", "mse(precision=7)", lambda g: MSE(granularity=g, precision=7)),
        ("percentile(0.1,99.9)", "percentile", lambda g: Percentile(granularity=g)),
        ("percentile(0.5, 99)", "percentile(0.5, 99.0)", lambda g: Percentile(0.5, 99, g)),
        ("percentile(upper=99)", "percentile(upper=99.0)", lambda g: Percentile(0.1, 99, g)),
        ("percentile(-0.0, 1e1)", "percentile(0.0, 10.0)", lambda g: Percentile(0, 10, g)),
        ("entropy()", "entropy", Entropy),
        (MSE, "mse", lambda g: MSE(granularity=g)),
        (Entropy(precision=6), "entropy(6)", lambda g: Entropy(g, 6)),
        (Percentile(1, 99, precision=4), "percentile(1.0, 99.0, 4)", lambda g: Percentile(1, 99, g, 4)),
    ],
)
def test_observers_are_descriptions_that_make_fresh_ones(given_, text, make):
    description = get_observer_spec(given_)
    assert str(description) == text
    assert get_observer_spec(text) == description == eval(repr(description))
    one, two = description.make("axis0"), description.make("axis0")
    assert one.is_like(make("axis0"))
    assert one is not two
    assert description.make().granularity == dt.PerTensor()


@pytest.mark.parametrize("value", ["ema", "EMAMinMax", "ema(0.9)", EMAMinMax, EMAMinMax(0.9)])
def test_a_moving_average_is_a_mode(value):
    with pytest.raises(dt.SpecError, match=r"moving average is a scale mode.*dt\.EMA"):
        dt.Rule(observer=value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("msee", "did you mean 'mse'"),
        ("mse(2.4", "unknown observer"),
        ("mse(0)", "norm must be a positive number"),
        ("mse(nan)", "must be a number"),
        ("mse(1e999)", "finite"),
        ("mse(norm=2, 3)", "unexpected setting"),
        ("mse(precision=2.5)", "integer"),
        ("mse(,)", "must be a number"),
        ("percentile(99, 1)", "lower < upper"),
        ("percentile(lower=1, 99)", "unexpected setting"),
        ("minmax(1)", "expected no settings"),
        (MinMax().observe([1.0]), "without data"),
        (MSE(granularity="axis0"), "granularity"),
        (BinnedObserver, "an observer class or an observer"),
        (int, "an observer class or an observer"),
        (3, "got 3 as observer"),
    ],
)
def test_what_is_no_description_of_an_observer(value, words):
    with pytest.raises(dt.SpecError, match=words):
        dt.Rule(observer=value)


def test_observer_spec_refuses_what_parse_never_gives_it():
    with pytest.raises(dt.SpecError, match="did you mean 'entropy'"):
        ObserverSpec("entropie")
    with pytest.raises(dt.SpecError, match="unknown setting 'norm'"):
        ObserverSpec("entropy", norm=2)
    with pytest.raises(dt.SpecError, match="observer 'mse'"):
        ObserverSpec("mse", norm=10**400)
    with pytest.raises(dt.SpecError, match="got 3 as observer"):
        ObserverSpec.parse(3)
    with pytest.raises(dt.SpecError, match="one of MinMax"):
        ObserverSpec.of("mse")


# Matching, and rules that override earlier ones


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (dt.Rule(), {"stem.conv", "blocks.0.fc1", "blocks.1.fc1", "classifier.head"}),
        (dt.Rule("blocks.*"), {"blocks.0.fc1", "blocks.1.fc1"}),
        (dt.Rule("Blocks.*"), set()),
        (dt.Rule("blocks"), set()),
        (dt.Rule("blocks.[!0].fc?"), {"blocks.1.fc1"}),
        (dt.Rule(r"re:.*\.(conv|head)"), {"stem.conv", "classifier.head"}),
        (dt.Rule("re:blocks"), set()),
        (dt.Rule("@first"), {"stem.conv"}),
        (dt.Rule("@last"), {"classifier.head"}),
        (dt.Rule("@last", types="Conv2d"), set()),
        (dt.Rule(types=("Conv2d", "MatMul")), {"stem.conv"}),
        (dt.Rule("*.fc1", types="Module"), {"blocks.0.fc1", "blocks.1.fc1"}),
        (dt.Rule("re:"), set()),
    ],
    ids=lambda value: repr(value) if isinstance(value, dt.Rule) else str(len(value)),
)
def test_matching(rule, names):
    assert {layer.name for layer in LAYERS if rule.matches(layer)} == names
    recipe = dt.Recipe([rule])
    for layer in LAYERS:
        decision = recipe.resolve(layer.name, list(layer.types), first=layer.first, last=layer.last)
        assert decision.rules == ((0,) if layer.name in names else ())


def test_no_rule_decides_nothing():
    assert dt.Recipe([]).resolve("x", []) == dt.Recipe([dt.Rule("y", weight="int8")]).resolve("x", []) == Decision()


def test_each_field_is_that_of_the_last_rule_that_sets_it():
    recipe = dt.Recipe(
        [
            dt.Rule(weight="int8/axis0", input="uint8", mode="ema", observer="mse"),
            dt.Rule("a", input="uint4", ste="tanh"),
            dt.Rule("b", weight="int2/axis0"),
            dt.Rule("a*", weight="int4/axis0", output="int8", mode="learned"),
        ]
    )
    assert recipe.resolve("a", ["Linear"]) == Decision(
        weight=INT4,
        input=dt.QuantSpec("uint4"),
        output=dt.QuantSpec("int8"),
        mode=dt.Learned(),
        ste=dt.ste.Tanh(),
        observer=ObserverSpec("mse"),
        rules=(0, 1, 3),
    )


@pytest.mark.parametrize(
    ("rules", "skip"),
    [
        ([dt.Rule(weight="int8"), dt.Rule(skip=True)], True),
        ([dt.Rule(skip=True), dt.Rule(weight="int8")], False),
        ([dt.Rule(skip=True), dt.Rule(input="int8")], False),
        ([dt.Rule(skip=True), dt.Rule(output="int8")], False),
        ([dt.Rule(skip=True), dt.Rule(mode="ema")], True),
        ([dt.Rule(skip=True), dt.Rule("other", weight="int8")], True),
        ([dt.Rule(skip=True), dt.Rule(weight="int8"), dt.Rule(skip=True)], True),
        ([dt.Rule(skip=True), dt.Rule(weight="int8"), dt.Rule(ste="tanh")], False),
    ],
    ids=repr,
)
def test_skip_and_its_end(rules, skip):
    assert dt.Recipe(rules).resolve("x", []).skip is skip


def test_fields_outlive_a_skip():
    recipe = dt.Recipe([dt.Rule(weight="int8", input="uint8"), dt.Rule(skip=True), dt.Rule(weight="int4/axis0")])
    decision = recipe.resolve("x", [])
    assert (decision.weight, decision.input, decision.skip) == (INT4, dt.QuantSpec("uint8"), False)


def test_dynamic_activations():
    recipe = dt.Recipe([dt.Rule("*", input="int8/token", mode=dt.PerBatch())])
    decision = recipe.resolve("x", ["Linear"])
    assert (decision.input.granularity, decision.mode) == (dt.PerToken(), dt.PerBatch())
    assert dt.Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize("layer", [("x",), "x", 3, ("x", 3), (3, ["a"]), ("x", [3]), ("x", ["a"], True)])
def test_what_is_no_layer(layer):
    with pytest.raises(dt.SpecError, match="layer"):
        dt.Recipe([]).check_matched([layer])


@pytest.mark.parametrize("text", ["int4/channel", "int4/channel/symmetric", "int4/channel/onnx"])
def test_channel_is_axis_0_of_a_rule(text):
    rule = dt.Rule(weight=text)
    assert rule == dt.Rule(weight="int4/axis0")
    assert dt.Recipe.from_toml(f'version = 1\nrules = [{{ weight = "{text}" }}]').rules == (rule,)


def test_channel_is_the_axis_of_a_torch_layers_outputs():
    nn, qt = pytest.importorskip("torch.nn"), pytest.importorskip("detent.torch")
    model = nn.Sequential(nn.Linear(6, 8), nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(4, 8, 3))
    layers = qt.plan(model, dt.Recipe([dt.Rule(weight="int8/channel")])).layers
    assert [layer.weights["weight"].granularity for layer in layers] == [dt.PerAxis(0), dt.PerAxis(0), dt.PerAxis(1)]


def test_channel_is_the_axis_of_an_onnx_layers_outputs():
    qo, helper = pytest.importorskip("detent.onnx"), pytest.importorskip("onnx.helper")
    weight = helper.make_tensor("w", 1, [6, 8], [0.5] * 48)
    infos = [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 6), ("y", 8))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", infos[:1], infos[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    layers = qo.plan(qo.prepare(model), dt.Recipe([dt.Rule(weight="int8/channel")])).layers
    assert [layer.weight.granularity for layer in layers] == [dt.PerAxis(1)]


@pytest.mark.parametrize("field", ["input", "output"])
def test_activations_have_no_output_channels(field):
    with pytest.raises(dt.SpecError, match=f"{field}='int8/channel'.*weight.*'tensor' or 'token'"):
        dt.Rule(**{field: "int8/channel"})


def test_one_type_alone_is_a_type():
    assert dt.Recipe([dt.Rule(types="Linear")]).resolve("x", "Linear").rules == (0,)


# Rules that match nothing


def test_matched_rules_are_silent():
    dt.Recipe.preset("w4a8").check_matched(LAYERS)
    dt.Recipe([]).check_matched([])
    dt.Recipe([dt.Rule(types="MatMul")]).check_matched([("/a/MatMul", ["MatMul"], False, False)])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (dt.Rule("blocks.0.fc"), r"no name matches 'blocks.0.fc': did you mean 'blocks.0.fc\*'\?"),
        (dt.Rule("blocks"), r"no name matches 'blocks': did you mean 'blocks.\*'\?"),
        (dt.Rule("fc1"), r"did you mean '\*.fc1'\?"),
        (dt.Rule("clasifier.*"), "no name matches .*did you mean 'classifier.head'"),
        (dt.Rule("Blocks.0.FC1"), "did you mean 'blocks.0.fc1' or 'blocks.1.fc1'"),
        (dt.Rule(r"re:blocks\.3\.fc1"), "did you mean 'blocks.1.fc1' or 'blocks.0.fc1'"),
        (
            dt.Rule("zzz"),
            "no name matches 'zzz': the model has 'blocks.0.fc1', 'blocks.1.fc1', 'classifier.head', ...",
        ),
        (dt.Rule(types="linear"), r"'\*' matches 4 layers, but no layer of type linear.*did you mean 'Linear'"),
        (dt.Rule("stem.*", types="Linear"), r"'stem.\*' matches 1 layer, but no layer of type Linear"),
        (
            dt.Rule("zzz", types="Linaer"),
            "no name matches 'zzz'.*; also, no layer has the type .*did you mean 'Linear'",
        ),
    ],
    ids=repr,
)
def test_unmatched(rule, words):
    with pytest.raises(dt.SpecError, match=words):
        dt.Recipe([rule]).check_matched(LAYERS)


def test_every_unmatched_rule_is_named():
    rules = [dt.Rule("haed"), dt.Rule("blocks.*", weight="int8"), dt.Rule(types="Conv3d"), dt.Rule("@first")]
    with pytest.raises(dt.SpecError) as caught:
        dt.Recipe(rules).check_matched([layer._replace(first=False) for layer in LAYERS])
    head, *lines = str(caught.value).splitlines()
    assert head == "3 of 4 rules match none of 4 layers:"
    assert [line.split(",")[0].strip() for line in lines] == ["rule 0", "rule 2", "rule 3"]
    assert lines[2].endswith("there is no first layer with weights")


def test_a_model_without_layers_matches_nothing():
    with pytest.raises(dt.SpecError, match=r"none of 0 layers:\n.*no name matches"):
        dt.Recipe([dt.Rule(types="Linear")]).check_matched([])


# Presets

FULL = ("int8/axis0", "uint8/tensor/affine")


@pytest.mark.parametrize(
    ("name", "weight", "given_", "ends"),
    [
        ("w8a8", "int8/axis0", "uint8/tensor/affine", False),
        ("w4a8", "int4/axis0", "uint8/tensor/affine", True),
        ("w4a4", "int4/axis0", "uint4/tensor/affine", True),
        ("w2a8", "int2/axis0", "uint8/tensor/affine", True),
        ("w3a3", "int3/axis0", "uint3/tensor/affine", True),
        ("w2a2", "int2/axis0", "uint2/tensor/affine", True),
        ("w8a4", "int8/axis0", "uint4/tensor/affine", True),
        ("w4a8-g32", "int4/group32", "uint8/tensor/affine", True),
        ("w8a8-g64", "int8/group64", "uint8/tensor/affine", False),
        ("fp8", "float8_e4m3fn/axis0", "float8_e4m3fn/tensor", False),
        ("w8a16", "int8/axis0", None, False),
        ("w4a16", "uint4/group128/affine", None, False),
        ("w4a16-g32", "uint4/group32/affine", None, False),
        ("w4a16-g64", "uint4/group64/affine", None, False),
        ("w4a16-g128", "uint4/group128/affine", None, False),
        ("w3a16", "uint3/group128/affine", None, False),
    ],
)
def test_presets(name, weight, given_, ends):
    rules = [dt.Rule(weight=weight, input=given_)]
    rules += [dt.Rule(match, weight=FULL[0], input=FULL[1]) for match in ("@first", "@last") if ends]
    assert dt.Recipe.preset(name).rules == tuple(rules)


def test_listed_presets_exist_and_are_named():
    assert {
        "w8a8",
        "w8a8-dynamic",
        "w4a8",
        "w4a4",
        "w2a8",
        "fp8",
        "w8a16",
        "w4a16",
        "w4a16-g32",
        "w4a16-g64",
        "w4a16-g128",
    } == set(PRESETS)
    for name in PRESETS:
        assert dt.Recipe.preset(name).name == name.replace("w4a16", "w4a16-g128" if name == "w4a16" else "w4a16")
    assert dt.Recipe.preset("w4a16") == dt.Recipe.preset("w4a16-g128")


def test_overrides_go_into_every_rule():
    recipe = dt.Recipe.preset("w4a4", mode=dt.Learned(), ste="identity", observer=MSE)
    assert len(recipe.rules) == 3
    for rule, plain in zip(recipe.rules, dt.Recipe.preset("w4a4").rules, strict=True):
        assert (rule.mode, rule.ste, rule.observer) == (dt.Learned(), dt.ste.Identity(), ObserverSpec("mse"))
        assert (plain.mode, plain.ste, plain.observer) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w8a9", "did you mean 'w8a"),
        ("W8A8", "did you mean 'w8a8'"),
        ("w1a8", "2 to 8 bits"),
        ("w9a8", "2 to 8 bits"),
        ("w4a16-g0", "did you mean 'w4a16"),
        ("w4a16-g032", "did you mean 'w4a16-g32'"),
        ("w4a16-128", "did you mean 'w4a16-g128'"),
        ("w8a8\n", "unknown preset"),
        ("w٤a8", "unknown preset"),  # a digit, but not an ASCII digit
        ("", "unknown preset"),
        (None, "unknown preset None"),
    ],
)
def test_unknown_presets(name, words):
    with pytest.raises(dt.SpecError, match=words):
        dt.Recipe.preset(name)


# Texts


def test_table_is_aligned_and_shows_what_is_set():
    recipe = dt.Recipe([dt.Rule("a\nb", types="Linear", weight="mxfp4", ste=custom), dt.Rule("head*", skip=True)])
    assert str(recipe).splitlines() == [
        "Recipe, 2 rules",
        "   match  types   weight  ste     skip",
        r"0  a\nb   Linear  mxfp4   custom  -",
        "1  head*  -       -       -       yes",
    ]
    assert str(dt.Recipe([], "none")) == "Recipe 'none', 0 rules"


def test_html_table_escapes_names():
    html = dt.Recipe([dt.Rule("<b>", skip=True)], "<i>")._repr_html_()
    assert "&lt;b&gt;" in html
    assert "&lt;i&gt;" in html
    assert "<b>" not in html
    assert "<i>" not in html
    assert "0 rules" in dt.Recipe([])._repr_html_()


def test_repr_is_short():
    assert repr(dt.Recipe.preset("w4a8")) == "dt.Recipe.preset('w4a8')"
    lines = repr(dt.Recipe.preset("w4a8", mode="learned")).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("dt.Recipe([", 5, "], name='w4a8')")
    assert max(map(len, lines)) <= 100


def test_diff():
    one, two = dt.Recipe.preset("w4a8"), dt.Recipe.preset("w4a8", mode="learned")
    assert one.diff(one) == one.diff("w4a8") == ""
    assert [line[0] for line in one.diff(two).splitlines()] == ["-", "-", "-", "+", "+", "+"]
    longer = dt.Recipe([*one.rules, dt.Rule("head", skip=True)], one.name)
    assert one.diff(longer).splitlines()[-1] == "+ dt.Rule('head', skip=True)"
    assert longer.diff(one).splitlines()[-1] == "- dt.Rule('head', skip=True)"
    assert one.diff(dt.Recipe(one.rules, "x")).splitlines()[:2] == ["- name 'w4a8'", "+ name 'x'"]


SPECS = st.sampled_from(
    [
        None,
        "int8/axis0",
        "uint8/tensor/affine",
        "uint4/group32@0/symmetric/torch",
        "int4/block8x16/affine/rlx",
        "float8_e5m2/token",
        "mxfp4",
        "nvfp4",
        "mxfp8/group16",
        dt.QuantSpec("int8", qmin=-100, qmax=100),
        dt.QuantSpec("int8", rounding="stochastic(18446744073709551615)"),
        dt.QuantSpec("uint8", convention=MINE),
    ]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NASTY = st.sampled_from(
    ['"', "\\", '"""', "'''", "\\u0041", "\x00", "\x7f", "\x1b", "\r\n", "a#b", "\u2028", "😀", "[x]"]
)
MATCHES = st.one_of(TEXT.filter(lambda text: text[0] != "@" and not text.startswith("re:")), NASTY)
MODES = st.one_of(
    st.sampled_from([None, "fixed", "learned", "per_batch", "ema"]),
    st.builds(dt.EMA, st.floats(0, 1, exclude_max=True)),
)
STES = st.one_of(
    st.sampled_from([None, "identity", "hard_tanh", "tanh", "tanh(step)"]),
    st.builds(dt.ste.Clipped, st.sampled_from(["code", "value"]), st.sampled_from(["inclusive", "exclusive"])),
)
OBSERVERS = st.one_of(
    st.sampled_from([None, "minmax", "entropy", "entropy(7)"]),
    st.builds(MSE, st.floats(0, 1e300, exclude_min=True), precision=st.integers(1, 10)),
    st.builds(Percentile, st.floats(0, 49), st.floats(50, 100), precision=st.integers(1, 10)),
)


@st.composite
def rules(draw):
    types = draw(st.lists(st.one_of(TEXT, NASTY), max_size=3))
    match = draw(st.one_of(st.sampled_from(["*", "@first", "@last", r"re:a\.(b|\d)+"]), MATCHES))
    if draw(st.booleans()):
        return dt.Rule(match, types=types, skip=True)
    specs = {name: draw(SPECS) for name in ("weight", "input", "output")}
    return dt.Rule(match, types=types, **specs, mode=draw(MODES), ste=draw(STES), observer=draw(OBSERVERS))


RECIPES = st.builds(dt.Recipe, st.lists(rules(), max_size=4), st.one_of(st.just(""), TEXT, NASTY))


@given(RECIPES)
def test_every_recipe_survives_json_toml_and_repr(recipe):
    assert dt.Recipe.from_json(recipe.to_json()) == recipe
    assert dt.Recipe.from_toml(recipe.to_toml()) == recipe
    assert eval(repr(recipe), {"dt": dt, **vars(dt)}) == recipe
    assert len(str(recipe).splitlines()) == 1 + bool(recipe.rules) + len(recipe.rules)


@given(RECIPES, RECIPES)
def test_equal_recipes_have_equal_texts_and_no_difference(one, two):
    assert (one == two) == (one.to_json() == two.to_json()) == (one.diff(two) == "")


@given(RECIPES)
def test_json_and_toml_hold_the_same(recipe):
    assert json.loads(recipe.to_json()) == tomllib.loads(recipe.to_toml())


@pytest.mark.parametrize("text", [dt.Recipe.to_json, dt.Recipe.to_toml])
def test_callables_stay_in_code(text, tmp_path):
    recipe = dt.Recipe([dt.Rule(), dt.Rule("a", ste=custom)])
    assert recipe.rules[1].ste == dt.ste.Custom(custom)
    with pytest.raises(dt.SpecError, match=r"rule 1: .*custom.* is a callable and cannot be written as text.*clipped"):
        text(recipe)
    with pytest.raises(dt.SpecError, match="callable"):
        recipe.save(tmp_path / "recipe.toml")
    assert not list(tmp_path.iterdir())


# Files


@pytest.mark.parametrize("name", ["recipe.toml", "recipe.json", "RECIPE.TOML"])
def test_files_come_back(name, tmp_path):
    recipe = dt.Recipe.preset("w4a8", mode="ema(0.5)")
    path = tmp_path / name
    path.write_text("old")
    recipe.save(path)
    recipe.save(str(path))
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert dt.Recipe.load(path) == dt.Recipe.load(str(path)) == get_recipe(path) == get_recipe(str(path)) == recipe
    assert get_recipe(recipe) is recipe


def test_files_that_are_no_recipes(tmp_path):
    for name, data, error, words in (
        ("a.yaml", b"", dt.FileFormatError, "the suffix .toml or .json"),
        ("a.toml", b"\xff", dt.FileFormatError, "UTF-8"),
        ("a.json", b" " * (1 << 20) + b"1", dt.FileFormatError, "1048576 bytes"),
        ("b.json", b"{}", dt.SpecError, r"b\.json: got a recipe with the keys"),
        ("b.toml", b"=", dt.SpecError, r"b\.toml: the text is not the TOML of a recipe"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(error, match=words):
            dt.Recipe.load(tmp_path / name)
    with pytest.raises(dt.FileFormatError, match="suffix"):
        dt.Recipe([]).save(tmp_path / "recipe")
    with pytest.raises(dt.FileFormatError, match="the limit of Recipe"):
        dt.Recipe([], name="x" * (1 << 20)).save(tmp_path / "large.toml")
    assert not (tmp_path / "large.toml").exists()
    with pytest.raises(dt.FileFormatError, match=r"none\.toml: no such file.* or a preset: w8a8, .*w4a16"):
        get_recipe(str(tmp_path / "none.toml"))
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(dt.FileFormatError, match=r"directory\.toml: is a directory"):
        dt.Recipe.load(tmp_path / "directory.toml")


def holding(**rule):
    return json.dumps({"version": 1, "rules": [rule]})


SPEC = dt.QuantSpec("int8", qmin=-100).to_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        (b"{}", "got bytes"),
        (None, "got NoneType"),
        ("[" * 100_000, "not valid JSON"),
        ('{"version": 1, "version": 1, "rules": []}', "duplicate keys"),
        ('{"version": ' + "1" * 5000 + ', "rules": []}', "not valid JSON"),
        (" " * (1 << 20) + "1", "1048576"),
        ("3", "JSON object"),
        ("[]", "JSON object"),
        ('{"rules": []}', "add 'version'"),
        ('{"version": 1}', "add 'rules'"),
        ('{"version": 2, "rules": []}', "update detent"),
        ('{"version": 0, "rules": []}', "write it again, or use the release of detent that wrote it"),
        ('{"version": true, "rules": []}', "expected version 1, an integer"),
        ('{"version": 1.0, "rules": []}', "expected version 1, an integer"),
        ('{"version": 1, "rules": [], "rulez": []}', "did you mean 'rules'"),
        ('{"version": 1, "rules": {}}', "list of tables"),
        ('{"version": 1, "rules": null}', "list of tables"),
        ('{"version": 1, "rules": [], "name": 3}', "got 3 as name of a recipe"),
        ('{"version": 1, "rules": [], "name": "\\ud800"}', "surrogate"),
        ('{"version": 1, "rules": [3]}', "as rule 0, expected a table"),
        ('{"version": 1, "rules": [' + "[" * 900 + "]" * 900 + "]}", "as rule 0, expected a table|not valid JSON"),
        (holding(wieght="int8"), "unknown key 'wieght' in rule 0: did you mean 'weight'"),
        (holding(**{"x" * 100_000: 1}), "unknown key .* in rule 0"),
        (holding(match=None), "rule 0: got None as match, expected text"),
        (holding(match=""), "not empty"),
        (holding(match="re:("), "rule 0: match 're:\\('"),
        (holding(match="\ud800"), "surrogate"),
        (holding(types=[1]), "as types, expected text or a list of texts"),
        (holding(types={"a": 1}), "as types, expected text or a list of texts"),
        (holding(types=[["Linear"]]), "as types, expected text or a list of texts"),
        (holding(weight=3), "as weight, expected text or a table"),
        (holding(weight=[]), "as weight, expected text or a table"),
        (holding(weight="int99"), "unknown format"),
        (holding(weight={}), "expected exactly"),
        (holding(weight={**SPEC, "format": []}), "a format name in 'format'"),
        (holding(weight={**SPEC, "granularity": [[]]}), "as granularity"),
        (holding(weight={**SPEC, "granularity": {"kind": "axis", "axis": "x"}}), "rule 0: "),
        (holding(weight={**SPEC, "convention": {**SPEC["convention"], "zero_range": []}}), "zero_range"),
        (
            holding(
                weight={**SPEC, "convention": {**SPEC["convention"], "zero_range": {"kind": "eps", "value": 10**400}}}
            ),
            "ZeroRange",
        ),
        (holding(weight={**SPEC, "scale_format": []}), "scale_format"),
        (holding(weight={**SPEC, "qmin": float("nan")}), "NaN"),
        (holding(mode={"kind": "EMA"}), "as mode, expected text"),
        (holding(mode="ema(nan)"), "decay"),
        (holding(mode="ema(" + "9" * 5000 + ")"), "unknown scale mode"),
        (holding(ste=True), "as ste, expected text"),
        (holding(ste="custom"), "unknown estimator"),
        (holding(observer="ema"), "moving average is a scale mode"),
        (holding(observer=["mse"]), "as observer, expected text"),
        (holding(skip=1), "as skip, expected true or false"),
        (holding(skip="true"), "as skip, expected true or false"),
        (holding(skip=True, weight="int8"), "rule 0: got skip=True"),
    ],
)
def test_hostile_json(text, words):
    with pytest.raises(dt.SpecError, match=words):
        dt.Recipe.from_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "add 'version'"),
        (b"", "got bytes"),
        ("version = 1\nversion = 1", "not the TOML"),
        ("version = 1\nrules = " + "[" * 100_000, "not the TOML"),
        ("version = 1\nrules = " + "{a=" * 100_000, "not the TOML"),
        ("version = 1\n[rules]\nmatch = 'a'", "list of tables"),
        ("version = 1\n[[rules]]\nmatch = 1979-05-27", "rule 0: got datetime.date.* as match, expected text"),
        ("version = 1\n[[rules]]\nmatch = 'a'\n[rules.weight]\nformat = 'int8'", "expected exactly"),
        ("version = 1\n[[rules]]\nmatch.x = 1", "as match, expected text"),
        ("version = 1\nrules = []\nx = inf", "unknown key 'x'"),
        ("version = 1\n" + "a" + ".a" * 100_000 + " = 1", "100000 dots"),
        ("version = 1\n[" + '"a".' * 100_000 + "a]", "100000 dots"),
        ("x = '''" + "''\n" * 10 + "'''''\n" + ".a" * 100_000 + " = 1", "100000 dots"),
        ('x = """\\""""""\n' + "a.a" * 100_000 + " = 1", "100000 dots"),
        ('"' + '\\"' * 200_000, "not the TOML"),
        ('"' + "\\" * 400_001, "not the TOML"),
        ('"""' + '\\"""' * 100_000, "not the TOML"),
        ("'" * 400_001, "not the TOML"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_hostile_toml_is_refused_in_time(text, words):
    start = time.monotonic()
    with pytest.raises(dt.SpecError, match=words):
        dt.Recipe.from_toml(text)
    assert time.monotonic() - start < 10


def test_dots_in_strings_and_comments_are_text():
    dots = "a." * 1000
    rules = [dt.Rule(dots, types=["'" + dots, '"' + dots, dots + '"""', "'''" + dots, "#" + dots], weight="int8")]
    recipe = dt.Recipe(rules, name=dots)
    assert dt.Recipe.from_toml(recipe.to_toml() + "# " + dots) == recipe
    text = f"version = 1\nname = '''\n{dots}'''\nrules = [] # it's {dots}\n"
    assert dt.Recipe.from_toml(text).name == dots


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [field.name for field in dataclasses.fields(dt.Rule)]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4))
def test_any_rule_of_a_file_is_one_or_a_spec_error(rule):
    try:
        recipe = dt.Recipe.from_json(holding(**rule))
    except dt.SpecError:
        return
    assert dt.Recipe.from_json(recipe.to_json()) == recipe


@given(st.sampled_from(sorted(SPEC)), JSON_VALUES)
def test_any_field_of_a_spec_is_one_or_a_spec_error(field, value):
    try:
        recipe = dt.Recipe.from_json(holding(weight={**SPEC, field: value}))
    except dt.SpecError:
        return
    assert dt.Recipe.from_json(recipe.to_json()) == recipe


@given(st.text(max_size=60))
def test_any_text_is_a_recipe_or_a_spec_error(text):
    for read in (dt.Recipe.from_json, dt.Recipe.from_toml):
        with pytest.raises(dt.SpecError):  # no text of this length names a version and rules
            read(text)


def test_dynamic_quantization_is_a_preset():
    recipe = dt.Recipe.preset("w8a8-dynamic")
    assert recipe.rules == dt.Recipe.preset("w8a8", mode=dt.PerBatch()).rules
    assert repr(recipe) == "dt.Recipe.preset('w8a8-dynamic')"
    assert dt.Recipe.from_toml(recipe.to_toml()) == recipe
    assert dt.Recipe.preset("w8a8-dynamic", mode="per_batch") == recipe
    assert recipe.resolve("fc", ["Linear"]).is_dynamic
    assert not dt.Recipe.preset("w8a8").resolve("fc", ["Linear"]).is_dynamic
    assert not dt.Recipe.preset("w8a16", mode="per_batch").resolve("fc", ["Linear"]).is_dynamic
    with pytest.raises(dt.SpecError, match=r"whose mode is PerBatch: omit mode="):
        dt.Recipe.preset("w8a8-dynamic", mode="ema(0.9)")


@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_a_block_format_is_a_preset_and_a_weight_spec(name):
    recipe = dt.Recipe.preset(name)
    assert recipe.rules == (dt.Rule(weight=name),) == (dt.Rule(weight=dt.gguf.BLOCK_FORMATS[name]),)
    assert repr(recipe) == f"dt.Recipe.preset({name!r})"
    assert dt.Recipe.from_toml(recipe.to_toml()) == dt.Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.resolve("fc", ["Linear"]).weight is dt.gguf.BLOCK_FORMATS[name]
    assert name in str(recipe)


def test_a_block_format_is_only_for_weights():
    with pytest.raises(dt.SpecError, match="q4_k is for weights"):
        dt.Rule(input="q4_k")
    with pytest.raises(dt.SpecError, match="did you mean 'q4_k'"):
        dt.Recipe.preset("q4k")
