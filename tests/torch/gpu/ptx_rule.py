"""The rule for generated code: which float operations of PTX keep the numeric contract (docs/numerics.md).

Each allowed operation is exact, or rounds once to the nearest even number and keeps subnormal numbers. ``add.rn`` and
``mul.rn`` are final, but the assembler may fuse a bare ``mul`` with a bare ``add`` that uses the product. Inductor
writes bare operations, so for its code the rule is weaker: no product is an operand of an addition.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["float_operations", "violations"]

TYPE = r"(?:f16|bf16|f32|f64)(?:x2)?"
OPERATION = re.compile(rf"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)*\.{TYPE}(?:\.\w+)*)\s+([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"%\w+")
MOVES = re.compile(r"(ld|st|mov|cvta|shfl)\.")
ALLOWED = re.compile(
    rf"""(div|add|sub|mul)\.rn\.{TYPE}     # one rounding
    |(abs|neg)\.{TYPE}
    |cvt\.rn\.\w+\.\w+                    # integer to float, or a narrower float
    |cvt\.rni\.(f32\.f32|f64\.f64)        # round half to even
    |cvt\.(f32\.b?f16|f64\.b?f16|f64\.f32) # exact
    |cvt\.rzi(\.\w+)?\.[su]\d+\.f(32|64)  # float that is an integer, to an integer
    |(setp|selp)\.(\w+\.)*{TYPE}""",
    re.VERBOSE,
)
BARE = re.compile(rf"(add|sub|mul)\.{TYPE}")


def float_operations(ptx: str) -> Counter[str]:
    """Count the float operations; loads, stores and moves are not operations."""
    return Counter(name for name, _ in OPERATION.findall(ptx) if not MOVES.match(name))


def violations(ptx: str, *, bare: bool = False) -> Counter[str]:
    """Count the float operations that break the rule; ``bare`` allows additions and products that cannot be fused."""

    def is_allowed(name: str) -> bool:
        return "ftz" not in name and bool(ALLOWED.fullmatch(name) or (bare and BARE.fullmatch(name)))

    found = Counter({name: n for name, n in float_operations(ptx).items() if not is_allowed(name)})
    return found + (_fusible(ptx) if bare else Counter())


def _fusible(ptx: str) -> Counter[str]:
    """Count the additions that have a bare product as an operand."""
    products, found = set(), Counter()
    for name, operands in OPERATION.findall(ptx):
        registers = REGISTER.findall(operands)
        is_copy = re.fullmatch(rf"mov\.{TYPE}", name) and products.intersection(registers[1:])
        if is_copy or re.fullmatch(rf"mul\.{TYPE}", name):
            products.add(registers[0])
        elif re.fullmatch(rf"(add|sub)\.{TYPE}", name) and products.intersection(registers[1:]):
            found[f"{name} of a product"] += 1
    return found
