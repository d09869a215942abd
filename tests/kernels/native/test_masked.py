"""Fake quantization with a mask: values, mask and gradient equal fake_quantize, the reference and its backward."""

import numpy as np
import pytest

import detent as dt
from detent.errors import DtypeError, OutError, ShapeError, SpecError, UnsupportedError

from .layouts import LAYOUTS
from .pairwise import pairwise
from .test_arrays import variety
from .test_small_formats import FORMATS as SMALL_FORMATS
from .test_small_formats import SCALES, beside_midpoints
from .twins import CONVENTIONS, DTYPES, ESTIMATORS, FORMATS, GRANULARITIES, LEVELS, Trial, at, difference, dtype_of

SELECTING = tuple(name for name in ESTIMATORS if name != "hard tanh")
SAMPLE = pairwise(
    {
        "dtype": DTYPES,
        "granularity": tuple(GRANULARITIES),
        "convention": CONVENTIONS,
        "ste": SELECTING,
        "level": LEVELS,
        "threads": (1, 2, 3),
        "format": FORMATS,
        "symmetric": (False, True),
        "rounding": (None, "half_even", "half_away", "floor"),
    }
)


def run(kernels, operation, arrays, params, out=None, step=0, **options):
    with dt.use_kernels(kernels):
        plan = dt.Plan.select(operation, shape=arrays[0].shape, dtype=arrays[0].dtype, spec=params.spec, **options)
        plan.check(*arrays, params, out)
        assert plan.kernel.backend == kernels
        return plan.run(*arrays, params, out=out, step=step)


def complaints(x, g, params, ste=None):
    """Return the mismatches of native values, mask and masked gradient, by name."""
    y, mask = run("native", "fake_quantize_masked", [x], params, ste=ste)
    expected = run("reference", "fake_quantize_masked", [x], params, ste=ste)
    gradient = run("native", "fake_quantize_masked_backward", [g, mask], params)
    mismatches = {
        "values": difference(y, expected[0]),
        "mask": difference(mask, expected[1]),
        "values of fake_quantize": difference(y, run("native", "fake_quantize", [x], params)),
        "gradient": difference(gradient, run("reference", "fake_quantize_backward", [g, x], params, ste=ste)),
        "native gradient": difference(gradient, run("native", "fake_quantize_backward", [g, x], params, ste=ste)),
        "gradient by the mask": difference(
            gradient, run("reference", "fake_quantize_masked_backward", [g, mask], params)
        ),
    }
    return {name: each for name, each in mismatches.items() if each is not None}


def complaints_of(trial):
    return complaints(trial.x, trial.g, trial.params, trial.ste)


@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_sample(number):
    row = SAMPLE[number]
    granularity, shape = GRANULARITIES[row["granularity"]]
    trial = Trial(
        "fake_quantize",
        row["dtype"],
        granularity,
        shape,
        row["convention"],
        row["format"],
        symmetric=row["symmetric"] and row["format"] != "uint1",
        rounding=row["rounding"],
        ste=ESTIMATORS[row["ste"]],
        seed=number,
    )
    with at(row["level"], row["threads"]):
        assert complaints_of(trial) == {}, row


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    with at(level):
        for size in range(131):
            ste = ESTIMATORS[SELECTING[size % len(SELECTING)]]
            trial = Trial("fake_quantize", dtype, shape=(size,), ste=ste, **variety(size))
            assert complaints_of(trial) == {}, trial


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("granularity", [dt.PerAxis(0), dt.PerAxis(1), dt.PerGroup(3), dt.PerGroup(32)], ids=str)
def test_every_length_of_rows(granularity, level):
    """Rows and sets end inside the bytes of the mask."""
    with at(level):
        for size in range(1, 131, 2):
            ste = ESTIMATORS[SELECTING[size % len(SELECTING)]]
            trial = Trial("fake_quantize", DTYPES[size // 2 % 4], granularity, (3, size), ste=ste, **variety(size))
            assert complaints_of(trial) == {}, trial


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [8, 15, 16, 24, 32, 48, 64, 128, 256, 264])
def test_groups_of_every_size(size, level):
    with at(level):
        for number, shape in enumerate([(3, 4 * size + 5), (17, size), (1, 9 * size - 1)]):
            ste = ESTIMATORS[SELECTING[(size // 8 + number) % len(SELECTING)]]
            trial = Trial("fake_quantize", DTYPES[number], dt.PerGroup(size), shape, ste=ste, **variety(size + number))
            assert complaints_of(trial) == {}, trial


@pytest.mark.parametrize("ste", SELECTING)
@pytest.mark.parametrize("size", [1023, 1025, 4095, 4097, 32767, 32769, 36865])
def test_lengths_at_the_edges_of_chunks_and_parts(size, ste):
    with at(threads=3):
        for granularity in (dt.PerTensor(), dt.PerGroup(1001)):
            trial = Trial("fake_quantize", DTYPES[size % 4], granularity, (size,), ste=ESTIMATORS[ste], seed=size)
            assert complaints_of(trial) == {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ste", SELECTING)
def test_all_16_bit_floats(ste, dtype, level):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    g = np.random.default_rng(0).permutation(x)
    with at(level):
        for convention in ("onnx", "oxicuda", "torch"):
            spec = dt.QuantSpec("int8", symmetric=False, convention=convention)
            assert complaints(x, g, dt.QuantParams(spec, np.float32(0.3), 3), ESTIMATORS[ste]) == {}, convention


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", SMALL_FORMATS)
def test_small_formats(form, dtype, level):
    with at(level):
        for number, scale in enumerate(SCALES):
            x = beside_midpoints(form, scale, dtype)
            wide = np.float64 if dtype == "float64" else np.float32
            params = dt.QuantParams(dt.QuantSpec(form), wide(scale))
            for ste in SELECTING[number % 2 :: 2]:
                assert complaints(x, x[::-1].copy(), params, ESTIMATORS[ste]) == {}, (scale, ste)


@pytest.mark.parametrize("form", SMALL_FORMATS)
@pytest.mark.parametrize("granularity", [dt.PerAxis(0), dt.PerAxis(1), dt.PerGroup(16)], ids=str)
def test_sets_of_small_formats(granularity, form):
    rng = np.random.default_rng(0)
    shape = (37, 1029)
    scale = rng.choice([0.0123, 1 / 3, 0.5], size=granularity.tiling(shape).scale_shape).astype(np.float32)
    x = rng.normal(scale=200, size=shape).astype(np.float32)
    for threads in (1, 2, 3):
        with at(threads=threads):
            assert complaints(x, x[::-1].copy(), dt.QuantParams(dt.QuantSpec(form, granularity), scale)) == {}, threads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_inputs(layout, dtype):
    ste = ESTIMATORS[SELECTING[len(layout) % len(SELECTING)]]
    trial = Trial("fake_quantize", dtype, dt.PerAxis(0), (7, 37), ste=ste)
    assert complaints(LAYOUTS[layout](trial.x), LAYOUTS[layout](trial.g), trial.params, trial.ste) == {}


@pytest.mark.parametrize("layout", ["offset by one", "every second", "backwards", "read-only", "not aligned"])
def test_layout_of_the_mask(layout):
    trial = Trial("fake_quantize_masked_backward", shape=(7, 37))
    arrays = [trial.g, LAYOUTS[layout](trial.mask)]
    assert difference(trial.run("native", arrays), trial.run("reference")) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["offset by one", "backwards", "transposed", "not aligned", "every second"])
def test_layout_of_the_output(layout, dtype):
    trial = Trial("fake_quantize", dtype, dt.PerGroup(5), (7, 37))
    y, mask = run("reference", "fake_quantize_masked", [trial.x], trial.params)
    out = LAYOUTS[layout](np.zeros_like(y))
    values, actual_mask = run("native", "fake_quantize_masked", [trial.x], trial.params, out)
    assert values is out
    assert difference((out, actual_mask), (y, mask)) is None
    out = LAYOUTS[layout](np.zeros_like(y))
    assert run("native", "fake_quantize_masked_backward", [trial.g, mask], trial.params, out) is out
    assert difference(out, run("reference", "fake_quantize_backward", [trial.g, trial.x], trial.params)) is None


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_nothing_beside_the_output_changes(kernels):
    trial = Trial("fake_quantize", shape=(5, 33))
    for operation, arrays in (("masked", [trial.x]), ("masked_backward", [trial.g, trial.mask])):
        around = np.full((7, 70), 77, np.float32)
        out = around[1:6, 3:69:2]
        run(kernels, f"fake_quantize_{operation}", arrays, trial.params, out)
        out[...] = 77
        assert (around == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("granularity", "shape"), [(dt.PerTensor(), ()), (dt.PerAxis(0), (3, 0)), (dt.PerToken(), (1, 1))]
)
def test_zero_dimensions_and_empty_arrays(granularity, shape, dtype):
    for seed in range(5):
        assert complaints_of(Trial("fake_quantize", dtype, granularity, shape, seed=seed)) == {}


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("ste", SELECTING)
def test_the_public_functions(ste, kernels):
    trial = Trial("fake_quantize", "float32", dt.PerAxis(0), (5, 33), "oxicuda")
    with dt.use_kernels(kernels):
        y, mask = dt.fake_quantize_masked(trial.x, trial.params, ste=ESTIMATORS[ste])
        gradient = dt.fake_quantize_masked_backward(trial.g, mask, trial.params)
        ones = dt.fake_quantize_backward(np.ones_like(trial.x), trial.x, trial.params, ste=ESTIMATORS[ste])
        assert difference(y, dt.fake_quantize(trial.x, trial.params)) is None
        assert difference(mask, np.packbits(ones.reshape(-1) != 0, bitorder="little")) is None
        expected = dt.fake_quantize_backward(trial.g, trial.x, trial.params, ste=ESTIMATORS[ste])
        assert difference(gradient, expected) is None


def test_a_gradient_that_is_not_finite_is_selected():
    x = np.array([0.0, 900.0, 1.0, 900.0, -900.0, np.nan], np.float32)
    g = np.array([np.inf, np.inf, np.nan, np.nan, -np.inf, np.inf], np.float32)
    params = dt.QuantParams.int8_symmetric()
    mask = dt.fake_quantize_masked(x, params)[1]
    assert mask.tolist() == [0b101]
    assert (
        difference(dt.fake_quantize_masked_backward(g, mask, params), np.array([np.inf, 0, np.nan, 0, 0, 0], "f4"))
        is None
    )


def test_stochastic_rounding_runs_on_the_reference():
    spec = dt.QuantSpec("int8", rounding="stochastic(7)")
    params = dt.QuantParams(spec, np.float32(0.37))
    x = np.random.default_rng(0).normal(scale=25, size=(17, 1001)).astype(np.float32)
    g = np.ones_like(x)
    with dt.use_kernels("native"), pytest.raises(UnsupportedError, match="stochastic"):
        dt.fake_quantize_masked(x, params)
    for step in (0, 5):
        with dt.use_kernels("auto"):
            y, mask = dt.fake_quantize_masked(x, params, step=step)
            gradient = dt.fake_quantize_masked_backward(g, mask, params)
        assert difference(y, dt.fake_quantize(x, params, step=step)) is None
        assert difference(gradient, dt.fake_quantize_backward(g, x, params, step=step)) is None
    assert (dt.fake_quantize_masked(x, params, step=0)[0] != y).any()


@pytest.mark.parametrize(
    "ste",
    [dt.ste.HardTanh(), "hard_tanh", dt.ste.Tanh(), dt.ste.Tanh("step"), lambda g, x, params: g],
    ids=lambda ste: str(getattr(ste, "__name__", ste)),
)
def test_estimators_that_weigh_are_refused(ste):
    with pytest.raises(SpecError, match="Identity and Clipped, whose gradient is 0 or 1: use fake_quantize_backward"):
        dt.fake_quantize_masked(np.zeros(3, np.float32), dt.QuantParams.int8_symmetric(), ste=ste)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.zeros(3, np.uint8), ShapeError, r"mask has shape \(3,\), expected \(2,\)"),
        (np.zeros(1, np.uint8), ShapeError, r"mask has shape \(1,\), expected \(2,\)"),
        (np.zeros(0, np.uint8), ShapeError, r"mask has shape \(0,\), expected \(2,\)"),
        (np.zeros((2, 1), np.uint8), ShapeError, r"mask has shape \(2, 1\), expected \(2,\)"),
        (np.zeros(2, np.int8), DtypeError, "mask has dtype int8, expected uint8"),
        (np.zeros(9, np.bool_), DtypeError, "mask has dtype bool, expected uint8"),
        ([0, 0], DtypeError, "mask must be a NumPy array, got list"),
    ],
)
def test_masks_that_do_not_fit(mask, error, message, kernels):
    with dt.use_kernels(kernels), pytest.raises(error, match=message):
        dt.fake_quantize_masked_backward(np.ones(9, np.float32), mask, dt.QuantParams.int8_symmetric())


def test_outputs_that_do_not_fit():
    x, params = np.zeros(9, np.float32), dt.QuantParams.int8_symmetric()
    for out in (np.zeros(8, np.float32), np.zeros(9, np.float64), x):
        with pytest.raises(OutError):
            dt.fake_quantize_masked(x, params, out=out)
        with pytest.raises(OutError):
            dt.fake_quantize_masked_backward(x, np.zeros(2, np.uint8), params, out=out)
    shared = np.zeros(9, np.float32)
    with pytest.raises(OutError, match="overlaps mask"):
        dt.fake_quantize_masked_backward(x, shared.view(np.uint8)[:2], params, out=shared)
