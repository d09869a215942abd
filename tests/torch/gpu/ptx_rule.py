"""The rule for generated code: which float operations of PTX keep the numeric contract (docs/numerics.md).

Each allowed operation is exact, or rounds once to the nearest even number and keeps subnormal numbers. A bare ``add``
or ``mul`` rounds to nearest, too, but the assembler may fuse a bare product with a bare addition that uses it (PTX
ISA); it never fuses ``add.rn`` and ``mul.rn``. Triton writes bare operations unless ``enable_fp_fusion`` is off, which
Inductor only does with its option ``emulate_precision_casts``. So for Inductor's code the rule is: no product is an
operand of an addition or subtraction, not even after a copy, a change of sign or an exact conversion. A selection ends
a product, because no fused operation can compute it. ``compiled_code.assembler_fuses`` checks that with the assembler.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["float_operations", "violations"]

TYPE = r"(?:f16|bf16|f32|f64)(?:x2)?"
OPERATION = re.compile(rf"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)*\.{TYPE}(?:\.\w+)*)\s+([^;]*);", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(\{[^}]*\}|[^,;]*),([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"%\w+")
MOVES = re.compile(r"(ld|st|mov|cvta|shfl)\.")
ALLOWED = re.compile(
    rf"""(div|add|sub|mul)\.rn\.{TYPE}     # one rounding
    |(add|sub)\.rn\.f32\.b?f16            # widens one operand, which is exact; one rounding
    |(abs|neg)\.{TYPE}
    |cvt\.rn\.\w+\.\w+                    # integer to float, or a narrower float
    |cvt\.rni\.(f32\.f32|f64\.f64)        # round half to even
    |cvt\.(f32\.b?f16|f64\.b?f16|f64\.f32) # exact
    |cvt\.rzi(\.\w+)?\.[su]\d+\.f(32|64)  # float that is an integer, to an integer
    |(setp|selp)\.(\w+\.)*{TYPE}""",
    re.VERBOSE,
)
BARE = re.compile(rf"(add|sub|mul)\.{TYPE}")
PRODUCT = re.compile(rf"mul\.{TYPE}")
SUM = re.compile(rf"(add|sub)\.{TYPE}")
PASSES_ON = re.compile(rf"mov\.({TYPE}|b\d+)|neg\.{TYPE}|cvt\.(f32\.b?f16|f64\.b?f16|f64\.f32)")


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
    products: set[str] = set()
    found: Counter[str] = Counter()
    for name, results, operands in INSTRUCTION.findall(ptx):
        uses_product = products.intersection(REGISTER.findall(operands))
        if PRODUCT.fullmatch(name) or (uses_product and PASSES_ON.fullmatch(name)):
            products.update(REGISTER.findall(results))
        elif uses_product and SUM.fullmatch(name):
            found[f"{name} of a product"] += 1
    return found
