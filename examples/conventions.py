"""The same formula, eleven answers: what rival conventions make of the same data.

Random data hides the differences; the points next to a tie, x = (k + 1/2) * s, show them.
"""

import numpy as np

import detent as dt

SCALE = np.float32(0.0123)
ZERO_POINT = 3


def around_ties(scale: np.float32, reach: int) -> np.ndarray:
    """Every (k + 1/2) * scale for |k| <= reach, with the next float on either side."""
    middle = (np.arange(-reach, reach, dtype=np.float32) + np.float32(0.5)) * scale
    return np.concatenate([np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)] + [middle])


def codes(x: np.ndarray, convention: dt.Convention) -> np.ndarray:
    spec = dt.QuantSpec(dt.int8, symmetric=False, convention=convention)
    return dt.quantize(x, dt.QuantParams(spec, scale=SCALE, zero_point=ZERO_POINT)).codes


def compare_codes() -> None:
    near_ties = around_ties(SCALE, reach=120)
    random = np.random.default_rng(0).normal(scale=0.5, size=near_ties.size).astype(np.float32)
    expected = codes(near_ties, dt.Convention.onnx), codes(random, dt.Convention.onnx)
    print(f"int8, scale {SCALE:.4f}, zero point {ZERO_POINT}: how many of {near_ties.size} codes differ from onnx's")
    print(f"  {'convention':<20}{'division':<12}{'rounding':<11}{'zero point':<14}{'near ties':>9}{'random':>8}")
    for convention in dt.convention.PRESETS.values():
        found = codes(near_ties, convention), codes(random, convention)
        ties, others = (int(np.count_nonzero(a != b)) for a, b in zip(found, expected, strict=True))
        rules = convention.division, convention.rounding, convention.zero_point
        same_rules = rules == ("divide", dt.rounding.half_even, "after_round")
        assert (ties == 0) == same_rules, convention.name
        print(f"  {convention.name:<20}{rules[0]:<12}{rules[1]!s:<11}{rules[2]:<14}{ties:>9}{others:>8}")


def compare_parameters(lo: float, hi: float) -> None:
    print(f"\nparameters for the range [{lo}, {hi}]")
    print(f"  {'convention':<20}{'int8 symmetric':>16}{'codes':>13}{'uint8 affine':>14}{'zero point':>12}")
    for name in dt.convention.PRESETS:
        symmetric = dt.QuantParams.from_range(f"int8/tensor/symmetric/{name}", lo, hi)
        affine = dt.QuantParams.from_range(f"uint8/tensor/affine/{name}", lo, hi)
        ends = f"{symmetric.spec.qmin}..{symmetric.spec.qmax}"
        print(f"  {name:<20}{symmetric.scale:>16.8f}{ends:>13}{affine.scale:>14.8f}{affine.zero_point:>12}")


if __name__ == "__main__":
    compare_codes()
    compare_parameters(-2.5, 1.0)
    compare_parameters(0.5, 2.5)  # no zero inside: some conventions widen the range, some do not
