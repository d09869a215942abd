"""Native equals reference over operation x dtype x granularity x convention x instruction set x threads.

`make test` runs a fixed sample in which every pair of values meets; `make test-all` runs the whole product. Format,
estimator, rounding, symmetry, NaN policy and the layout of `out` are part of the sample; in the product they alternate.
"""

from itertools import product

import numpy as np
import pytest

import detent as dt
from detent.packing import packed_size

from .pairwise import pairwise
from .twins import (
    CONVENTIONS,
    DTYPES,
    ESTIMATORS,
    FORMATS,
    GRANULARITIES,
    LEVELS,
    MASKED,
    OPERATIONS,
    Trial,
    at,
    difference,
    native_result,
    reference_result,
)

THREADS = (1, 2, 3)
OUTS = ("none", "contiguous", "strided", "packed")
MATRIX = {
    "operation": OPERATIONS + MASKED,
    "dtype": DTYPES,
    "granularity": tuple(GRANULARITIES),
    "convention": CONVENTIONS,
}
WHERE = {"level": LEVELS, "threads": THREADS}
ALSO = {
    "format": FORMATS,
    "symmetric": (False, True),
    "rounding": (None, "half_even", "half_away", "floor"),
    "ste": tuple(ESTIMATORS),
    "nan": ("default", "raise", "zero_point", "qmin"),
    "out": OUTS,
}
ALTERNATING = [(name, values, step) for (name, values), step in zip(ALSO.items(), (1, 5, 3, 1, 1, 1), strict=True)]
SAMPLE = pairwise(MATRIX | WHERE | ALSO)


def trial_of(row, seed=0):
    """Make the trial of a row; arguments that the operation does not have are left out."""
    granularity, shape = GRANULARITIES[row["granularity"]]
    # Masks exist only for estimators that select gradients, not for those that scale them.
    ste = ESTIMATORS[row["ste"] if row["operation"] not in MASKED or row["ste"] != "hard tanh" else "code"]
    has_policy = row["operation"] in ("quantize", "fake_quantize") and row["nan"] != "default"
    return Trial(
        operation=row["operation"],
        dtype=row["dtype"],
        granularity=granularity,
        shape=shape,
        convention=row["convention"],
        format=row["format"],
        symmetric=row["symmetric"] and row["format"] != "uint1",
        rounding=row["rounding"],
        ste=ste,
        nan=row["nan"] if has_policy else None,
        seed=seed,
    )


def out_for(kind, like, trial):
    """An array for the result, or None."""
    if kind == "none":
        return None
    if kind == "packed" and trial.operation == "quantize":
        return np.full(packed_size(like.size, trial.params.spec.bits), 0xA5, np.uint8)
    if kind == "strided":
        return np.full((*like.shape[:-1], 2 * like.shape[-1]), 1).astype(like.dtype)[..., ::-2]
    return np.empty(like.shape, like.dtype)


def values_of(result):
    """The array of a result that is written to ``out``: the first one if there are several."""
    return result[0] if isinstance(result, tuple) else result


def expected_in(out, result, trial):
    """Return the expected native result for a result of the reference: packed if ``out`` is."""
    packed = out is not None and out.shape != values_of(result).shape
    return dt.packing.pack(result, trial.params.spec.bits) if packed else result


@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_sample(number):
    row = SAMPLE[number]
    trial = trial_of(row, seed=number)
    expected = reference_result(trial)
    out = out_for(row["out"], values_of(expected), trial)
    with at(row["level"], row["threads"]):
        result = native_result(trial, out=out)
    assert difference(result, expected_in(out, expected, trial)) is None, row
    assert out is None or values_of(result) is out


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "dtype", "granularity", "convention"), list(product(*MATRIX.values())))
def test_product(operation, dtype, granularity, convention):
    row = {"operation": operation, "dtype": dtype, "granularity": granularity, "convention": convention}
    places = zip(MATRIX.values(), row.values(), (1, 7, 31, 3), strict=True)
    number = sum(list(values).index(value) * step for values, value, step in places)
    row |= {name: values[number * step % len(values)] for name, values, step in ALTERNATING}
    trial = trial_of(row, seed=number)
    expected = reference_result(trial)
    for level, threads in product(LEVELS, THREADS):
        out = out_for(row["out"], values_of(expected), trial)
        with at(level, threads):
            result = native_result(trial, out=out)
        assert difference(result, expected_in(out, expected, trial)) is None, (level, threads, row)
