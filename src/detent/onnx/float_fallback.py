"""Damage: how much noise layers cause at the outputs of a model, and which of them should rather stay float.

One session serves all questions: its graph holds every weight twice, as it is and rounded, and a switch before each
quantizer. Noise of several layers about adds up, so that groups of layers are asked first, and only those that cause
much are asked one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import Switches
from detent.params import QuantParams

__all__ = ["choose_float"]

SHARE, LARGEST, MOST = 0.25, 0.1, 5
LITTLE = 1e-4  # of an output's power: noise that nobody has to be left in float for
HELPS = 0.9  # the part of the noise that may be left without a layer
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
    switches = Switches(plan, params, samples)
    total = switches.all_noise()
    if not np.isfinite(total) or total <= LITTLE * switches.count:
        return {}
    sizes = {line.name: line.nbytes_before for line in plan.layers}
    limit = LARGEST * plan.nbytes_before
    found = [name for name in switches.worst(SHARE) if sizes[name] < limit]
    caused = {name: switches.noise([name]) / total for name in found}
    small = {name: share for name, share in caused.items() if share >= SHARE}  # on all samples, too
    ranked = sorted(small, key=lambda name: -small[name] / sizes[name])
    kept, left = dict[str, float](), total
    for name in ranked[:MOST]:  # where noise is as large as the signal, less of it in one place may be more in all
        without = switches.all_noise([*kept, name])
        if without < HELPS * left:
            kept[name], left = small[name], without
    return kept
