"""Compare quantization formats on one weight matrix, compute gradients, save and load.

The script also asserts that fake quantization equals quantize followed by dequantize, bit for bit.
"""

import tempfile
from pathlib import Path

import numpy as np

import detent as dt

SPECS = (
    "int8",
    "int8/axis0",
    "uint8/axis0",
    "int4/axis0",
    "int4/group32",
    "uint4/group32",
    "nf4/group64",
    "float8_e4m3fn/axis0",
    "mxfp4",
    "nvfp4",
)


def weights() -> np.ndarray:
    """A random matrix whose rows have different magnitudes, as in trained layers."""
    rng = np.random.default_rng(0)
    rows = np.exp2(rng.uniform(-3, 1, size=(128, 1)))
    return (0.05 * rows * rng.normal(size=(128, 512))).astype(np.float32)


def compare_formats(x: np.ndarray) -> None:
    print(f"{'spec':<21}{'bits':>5}{'smaller':>9}{'SQNR dB':>9}{'max error':>11}{'bound':>9}{'clipped':>9}")
    for name in SPECS:
        params = dt.QuantParams.from_data(name, x)
        q = dt.quantize(x, params)
        y = q.dequantize()

        # Fake quantization in training equals the stored values, bit for bit.
        assert y.tobytes() == dt.fake_quantize(x, params).tobytes()

        error, bound = dt.metrics.max_error(x, y), params.quantization_error_bound()
        clipped = dt.metrics.clip_fraction(x, params)
        rounding = 2.0**-22 * q.spec.num_levels  # relative float rounding error of x / s and y
        assert clipped > 0 or error <= bound * (1 + rounding), name
        print(
            f"{name:<21}{q.spec.bits:>5}{x.nbytes / q.nbytes:>8.2f}x{dt.metrics.sqnr_db(x, y):>9.2f}"
            f"{error:>11.5f}{bound:>9.5f}{clipped:>9.2%}"
        )
    print("in every row, dequantize(quantize(x)) equals fake_quantize(x) bit for bit")


def show_gradients() -> None:
    params = dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.01)
    x = np.array([-2.0, -1.272, 0.5, 1.0, 1.272], np.float32)
    g = np.ones_like(x)
    print("\ngradients of x: int8 with scale 0.01 covers -1.27 to 1.27, and -1.272 still rounds to code -127")
    print(f"  {'x':<41}{row(x)}")
    for ste in (dt.ste.Identity(), dt.ste.Clipped(), dt.ste.Clipped(on="value"), dt.ste.HardTanh()):
        print(f"  {ste!s:<41}{row(dt.fake_quantize_backward(g, x, params, ste=ste))}")
    gx, gs, gz = dt.fake_quantize_learned_backward(g, x, params)
    assert gx.tolist() == [0, 1, 1, 1, 1]
    assert gs.shape == gz.shape == params.scale.shape
    print(f"  gradient of the scale (LSQ): {float(gs):.3f}, of the zero point (LSQ+): {float(gz):.6f}")


def row(values: np.ndarray) -> str:
    return "".join(f"{value:>8.3f}" for value in values)


def save_and_load(x: np.ndarray) -> None:
    q = dt.quantize(x, dt.QuantParams.from_data("int4/group32", x))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "weights.safetensors")
        q.save(path)
        loaded = dt.QuantizedTensor.load(path)
    assert loaded == q
    assert loaded.dequantize().tobytes() == q.dequantize().tobytes()
    print(f"\nsaved and loaded without a change:\n  {loaded}")


def main() -> None:
    x = weights()
    print(f"detent {dt.__version__} on {x.shape[0]} x {x.shape[1]} float32 weights\n")
    compare_formats(x)
    show_gradients()
    save_and_load(x)


if __name__ == "__main__":
    main()
