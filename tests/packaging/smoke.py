"""Check an installed detent, without any other package; run it from outside the source tree.

`python smoke.py` requires native kernels and compares them with the reference kernels, bit for bit;
`python smoke.py reference` requires an installation without native kernels.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import detent as dt

SPECS = ("int8", "uint8/axis0", "int4/group32", "uint4/token", "int8/axis-1/rlx")
DTYPES = ("float16", ml_dtypes.bfloat16, "float32", "float64")


def data():
    """Data that is half ties of an int8 scale of 1, half random; the last group of each row is incomplete."""
    ties = np.resize(np.arange(-254, 255) / 2, (16, 100))
    return np.concatenate([ties, np.random.default_rng(0).normal(scale=20, size=(16, 100))])


def results(kernels, spec, x):
    with dt.use_kernels(kernels):
        params = dt.QuantParams.from_data(spec, x)
        q = dt.quantize(x, params)
        y, gx = dt.fake_quantize(x, params), dt.fake_quantize_backward(x, x, params)
        return {"scale": params.scale, "codes": q.codes, "dequantized": q.dequantize(), "fake": y, "gradient": gx}


def bits(array):
    return array.dtype, array.shape, array.tobytes()


def compare(kernels):
    """Run everything on both kernels; return how many results were compared."""
    count = 0
    for spec in SPECS:
        for dtype in DTYPES:
            x = data().astype(dtype)
            arrays, expected = results(kernels, spec, x), results("reference", spec, x)
            assert bits(arrays["dequantized"]) == bits(arrays["fake"]), f"{spec} of {x.dtype}: fake differs"
            for name, array in arrays.items():
                assert bits(array) == bits(expected[name]), f"{spec} of {x.dtype}: {name} differs from the reference"
                count += 1
    return count


def main(kernels="native"):
    able = dt.capabilities()
    if kernels == "native":
        assert able.level != "none", f"no native kernels:\n{able}"
    else:
        assert able.level == "none", f"native kernels where none were expected:\n{able}"
        assert set(able.kernels.values()) == {"reference"}, str(able)
    count = compare(kernels)
    where = Path(dt.__file__).parent
    print(f"detent {dt.__version__}, kernels {kernels}, level {able.level}, {count} results equal, {where}")


if __name__ == "__main__":
    main(*sys.argv[1:])
