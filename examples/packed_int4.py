"""Quantize weights to 4 bits with one scale per group, inspect the packed bytes, and save, load and slice a tensor."""

import tempfile
from pathlib import Path

import numpy as np

import detent as dt


def main() -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(scale=0.02, size=(64, 300)).astype(np.float32)

    # 300 is not a multiple of 128: each row has two groups of 128 and one of 44.
    spec = dt.QuantSpec(dt.uint4, granularity=dt.PerGroup(128))
    params = dt.QuantParams.from_data(spec, weight)
    q = dt.quantize(weight, params)
    print(q)
    print(f"scales {params.scale.shape}, zero points {params.zero_point.shape}, codes {q.codes.shape} {q.codes.dtype}")
    assert params.scale.shape == (64, 3)

    # Each byte has two codes, the first code in its low half. Other tools use other layouts.
    first, second = (int(code) for code in q.codes[0, :2])
    assert q.packed.size == weight.size // 2
    assert q.packed[0] == first | second << 4
    swapped = dt.packing.pack(q.codes, bits=4, layout="high_first")
    assert swapped[0] == second | first << 4
    print(f"codes {first}, {second} -> byte {q.packed[0]:#04x} (low_first), {swapped[0]:#04x} (high_first)")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "weight.safetensors")
        q.save(path)
        loaded = dt.QuantizedTensor.load(path)
    assert loaded == q

    # A slice must not split groups: it may begin at any row, but only at columns that are multiples of 128.
    part = loaded[10:20, 128:]
    assert np.array_equal(part.dequantize(), q.dequantize()[10:20, 128:])
    try:
        loaded[:, 100:]
    except dt.ShapeError as error:
        print(f"rejected: {error}")
    print(f"rows 10 to 19 from column 128 on: {part}")


if __name__ == "__main__":
    main()
