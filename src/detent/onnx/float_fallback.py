"""Float fallback: which layers stay float, since they alone cause much of the noise at the outputs.

A layer is kept in float where it causes a quarter of the noise, holds few weights, and the noise is less without it:
where noise is as large as the signal, less of it in one place may be more in all. ``SwitchableModel`` measures it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import SwitchableModel
from detent.params import QuantParams

__all__ = ["choose_float"]

MIN_NOISE_SHARE = 0.25  # of all noise, that a layer alone causes
MAX_WEIGHT_SHARE = 0.1  # of the model's bytes, that a layer holds
MAX_LAYERS = 5
NEGLIGIBLE_NOISE = 1e-4  # relative to output power; below it no layer is kept in float
MAX_REMAINING_NOISE = 0.9  # float fallback must remove at least 10 % of the noise
Array = NDArray[Any]

Feed = dict[str, Array]


def choose_float(plan: GraphPlan, params: Mapping[str, QuantParams], samples: Sequence[Feed]) -> dict[str, float]:
    """The layers that cause more than a quarter of all noise, hold few weights and are better left out; at most 5.

    Each comes with its share of the noise.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''), "w4a8")
    >>> choose_float(made, {}, [{"x": np.float32([[2.0, 2.0]])}])
    {}
    """
    switches = SwitchableModel(plan, params, samples)
    total = switches.all_noise()
    if not np.isfinite(total) or total <= NEGLIGIBLE_NOISE * switches.count:
        return {}
    sizes = {line.name: line.nbytes_before for line in plan.layers}
    limit = MAX_WEIGHT_SHARE * plan.nbytes_before
    worst = [name for name in switches.worst(MIN_NOISE_SHARE) if sizes[name] < limit]
    shares = {name: switches.noise([name]) / total for name in worst}
    shares = {name: share for name, share in shares.items() if share >= MIN_NOISE_SHARE}  # on all samples, too
    ranked = sorted(shares, key=lambda name: -shares[name] / sizes[name])
    kept, remaining = dict[str, float](), total
    for name in ranked[:MAX_LAYERS]:
        without = switches.all_noise([*kept, name])
        if without < MAX_REMAINING_NOISE * remaining:
            kept[name], remaining = shares[name], without
    return kept
