"""Compare the codes and parameters that eleven quantization conventions compute for the same data.

Random data rarely show a difference. Values at a tie, x = (k + 1/2) * s, or next to a tie show it.
"""

import numpy as np

import detent as dt

SCALE = np.float32(0.0123)
ZERO_POINT = 3


def around_ties(scale: np.float32, count: int) -> np.ndarray:
    """The ties (k + 1/2) * scale for -count <= k < count, each with the next smaller and the next larger float."""
    ties = (np.arange(-count, count, dtype=np.float32) + np.float32(0.5)) * scale
    return np.concatenate([np.nextafter(ties, np.float32(toward)) for toward in (-np.inf, np.inf)] + [ties])


def codes(x: np.ndarray, convention: dt.Convention) -> np.ndarray:
    spec = dt.QuantSpec(dt.int8, symmetric=False, convention=convention)
    return dt.quantize(x, dt.QuantParams(spec, scale=SCALE, zero_point=ZERO_POINT)).codes


def compare_codes() -> None:
    near_ties = around_ties(SCALE, count=120)
    random = np.random.default_rng(0).normal(scale=0.5, size=near_ties.size).astype(np.float32)
    expected = codes(near_ties, dt.Convention.onnx), codes(random, dt.Convention.onnx)
    print(f"int8, scale {SCALE:.4f}, zero point {ZERO_POINT}: how many of {near_ties.size} codes differ from onnx")
    print(f"  {'convention':<20}{'division':<12}{'rounding':<11}{'zero point':<14}{'near ties':>9}{'random':>8}")
    for convention in dt.convention.PRESETS.values():
        actual = codes(near_ties, convention), codes(random, convention)
        at_ties, at_random = (int(np.count_nonzero(a != b)) for a, b in zip(actual, expected, strict=True))
        rules = convention.division, convention.rounding, convention.zero_point
        same_rules = rules == ("divide", dt.rounding.half_even, "after_round")
        assert (at_ties == 0) == same_rules, convention.name
        print(f"  {convention.name:<20}{rules[0]:<12}{rules[1]!s:<11}{rules[2]:<14}{at_ties:>9}{at_random:>8}")


def compare_parameters(lo: float, hi: float) -> None:
    print(f"\nparameters for the range [{lo}, {hi}]")
    print(f"  {'convention':<20}{'int8 symmetric':>16}{'codes':>13}{'uint8 affine':>14}{'zero point':>12}")
    for name in dt.convention.PRESETS:
        symmetric = dt.QuantParams.from_range(f"int8/tensor/symmetric/{name}", lo, hi)
        affine = dt.QuantParams.from_range(f"uint8/tensor/affine/{name}", lo, hi)
        code_range = f"{symmetric.spec.qmin}..{symmetric.spec.qmax}"
        print(f"  {name:<20}{symmetric.scale:>16.8f}{code_range:>13}{affine.scale:>14.8f}{affine.zero_point:>12}")


if __name__ == "__main__":
    compare_codes()
    compare_parameters(-2.5, 1.0)
    compare_parameters(0.5, 2.5)  # the range does not include zero: some conventions widen it to zero
