"""The rule for generated AMD code: which fused multiply-adds keep the numeric contract (docs/numerics.md).

AMD code has no approximate division, and keeps subnormal numbers. Every fused multiply-add must belong to a division,
which has five of them.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["violations"]

PER_DIVISION = 5


def violations(assembly: str) -> Counter[str]:
    """Count products that are fused with an addition of a constant, and fused operations that no division explains.

    Divisions of integers by float reciprocals (``v_rcp_iflag``) have their own fused operations, so the second check
    only applies to code without them.
    """
    found = Counter(re.findall(r"^\s*(v_(?:fmaak|fmamk|pk_fma|mad)_\w*f(?:16|32|64)\w*)", assembly, re.MULTILINE))
    if "v_rcp_iflag" in assembly:
        found.pop("v_fmamk_f32", None)
        found.pop("v_fmaak_f32", None)
        return found
    for bits in ("32", "64"):
        fused = len(re.findall(rf"^\s*v_fmac?_f{bits}", assembly, re.MULTILINE))
        divisions = len(re.findall(rf"^\s*v_div_fixup_f{bits}", assembly, re.MULTILINE))
        steps = len(re.findall(rf"^\s*v_div_fmas_f{bits}", assembly, re.MULTILINE))
        if fused > PER_DIVISION * max(divisions, steps):
            found[f"v_fma_f{bits} without a division"] = fused - PER_DIVISION * divisions
    found.update(re.findall(r"^\s*(v_(?:rcp|rsq|sqrt|exp|log)_f16\w*|v_fma_mix\w*)", assembly, re.MULTILINE))
    return found
