"""Scales of groups that fit the data: for weight-only matmuls, they lower the error at the output of the layer.

Without data, the scales of a group have the least squared error of the weight w. With data, the error at the output of
``y = x w`` is known: with the errors ``e = w' - w`` of a column and the second moments ``H = sum(x x')`` of the layer's
inputs, it is ``e' H e``, summed over the columns. ``with_fitted_scales`` chooses the scale and zero point of each group
of a column so that this error becomes small. Codes still follow from the weight, its scales and its zero points.

- The search starts from the scales without data. It goes through the groups of a column twice, and takes the candidate
  with the least error of the column, given the other groups.
- Candidates are scales from the min-max scale down to ``LEAST_FACTOR`` of it. An affine spec tries three zero points
  for each of them. No candidate has a larger squared error of the weight than the min-max parameters.
- H has a ridge: few rows say little about the inputs to come. The ridge is ``RIDGE`` of the mean second moment, or the
  number of columns of x divided by its rows, if that is more.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.error_places import at
from detent.granularity import PerGroup
from detent.kernels.reference.scale_search import FACTORS
from detent.onnx.graph_plan import MINMAX_BITS, GraphPlan, LayerPlan
from detent.onnx_model.graph import MATMULS
from detent.onnx_model.sessions import record_in_parts
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["with_fitted_scales"]

Array = NDArray[Any]
Feed = dict[str, Array]
Key = tuple[str, QuantSpec]  # a weight and its spec
RIDGE = 0.1
LEAST_FACTOR = 0.85
SWEEPS = 2
STEP = 12  # distance of candidates, in positions of ``scale_search``: a factor of 0.992
MATRIX = 2  # axes


class _Moments(NamedTuple):
    """Sum of ``x x'`` over the rows of a layer's inputs, and the number of rows."""

    sums: NDArray[np.float64]
    rows: int


def with_fitted_scales(plan: GraphPlan, samples: Sequence[Feed], memory_budget: int | None = None) -> GraphPlan:
    """Return the plan with scales that fit the samples; the same plan if no layer is a weight-only matmul with groups.

    ``memory_budget`` limits the bytes of activations that are recorded at once.
    """
    lines: dict[Key, LayerPlan] = {}
    inputs: dict[Key, list[str]] = {}
    for line in plan.quantized:
        if line.weight is not None and _is_fitted(plan, line):
            layer = plan.layers_by_name[line.name]
            lines.setdefault((layer.weight, line.weight), line)
            inputs.setdefault((layer.weight, line.weight), []).append(layer.data)
    if not inputs or not samples:
        return plan
    moments = _second_moments(plan, [name for names in inputs.values() for name in names], samples, memory_budget)
    fitted: dict[Key, QuantParams] = {}
    for key, names in inputs.items():
        with at("layer", lines[key].name):
            measured = [moments[name] for name in names if name in moments and moments[name].rows]
            if measured:
                total = _Moments(np.sum([each.sums for each in measured], axis=0), sum(each.rows for each in measured))
                start = plan.weight_params(lines[key])
                fitted[key] = _fitted(plan.graph.array(key[0]), start, _group_size(key[1]), total)
    return plan.with_weight_params(fitted) if fitted else plan


def _is_fitted(plan: GraphPlan, line: LayerPlan) -> bool:
    layer, spec = plan.layers_by_name[line.name], line.weight
    if spec is None or line.input is not None or line.dynamic_input is not None or layer.is_weight_only:
        return False
    is_searchable = spec.format.is_integer and spec.scale_format == "float" and spec.rounding.kind != "stochastic"
    is_grouped = _group_size(spec) > 0 and len(layer.shape) == MATRIX and spec.bits < MINMAX_BITS
    return is_grouped and is_searchable and layer.node.op_type in MATMULS


def _group_size(spec: QuantSpec) -> int:
    """Return the size of groups along the first axis, as in a matmul of normal form; 0 for other granularities."""
    kind = spec.granularity
    return kind.size if isinstance(kind, PerGroup) and kind.axis == 0 else 0


def _second_moments(
    plan: GraphPlan, names: Sequence[str], samples: Sequence[Feed], memory_budget: int | None
) -> dict[str, _Moments]:
    moments: dict[str, _Moments] = {}
    for _, recorded in record_in_parts(plan.model, list(dict.fromkeys(names)), samples, memory_budget):
        for name, x in recorded.items():
            with at("tensor", name):
                rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
                before = moments.get(name, _Moments(np.zeros((rows.shape[1],) * 2), 0))
                moments[name] = _Moments(before.sums + rows.T @ rows, before.rows + len(rows))
    return moments


def _fitted(weight: Array, start: QuantParams, group_size: int, moments: _Moments) -> QuantParams:
    """Search the scales and zero points of a weight with groups along its first axis."""
    return QuantParams(start.spec, *_Search(weight, start, group_size, _with_ridge(moments)).run())


def _with_ridge(moments: _Moments) -> Array:
    size = len(moments.sums)
    mean = max(float(np.trace(moments.sums)) / size, 1e-30)
    ridge = max(RIDGE, size / moments.rows)
    return (moments.sums / mean + ridge * np.eye(size)).astype(np.float32)


class _Search:
    """Search of the scales of a weight with groups along its first axis."""

    def __init__(self, weight: Array, start: QuantParams, group_size: int, moments: Array) -> None:
        self._weight, self._spec, self._moments = weight, start.spec, moments
        self._scale, self._zero = start.scale.copy(), start.zero_point.copy()
        self._minmax = QuantParams.from_data(start.spec, weight)
        self._errors = self._error(weight, start.scale, start.zero_point)
        self._parts = [slice(i, min(i + group_size, len(weight))) for i in range(0, len(weight), group_size)]

    def run(self) -> tuple[Array, Array]:
        for _ in range(SWEEPS):
            for number, part in enumerate(self._parts):
                self._improve(number, part)
        return self._scale, self._zero

    def _improve(self, number: int, part: slice) -> None:
        """Choose the scale and zero point of one group in every column."""
        own, weight, errors = self._moments[part, part], self._weight[part], self._errors[part]
        others = 2 * (self._moments[part] @ self._errors - own @ errors)
        best = np.sum((own @ errors + others) * errors, axis=0)
        limit: Any = None
        for scale, zero in self._candidates(number):
            tried = self._error(weight, scale[None], zero[None])
            squares = np.sum(tried * tried, axis=0, dtype=np.float64)
            limit = squares if limit is None else limit  # the first candidate has the min-max parameters
            error = np.sum((own @ tried + others) * tried, axis=0)
            better = (error < best) & (squares <= limit)
            best = np.where(better, error, best)
            errors[:, better] = tried[:, better]  # a view of self._errors
            self._scale[number, better], self._zero[number, better] = scale[better], zero[better]

    def _candidates(self, number: int) -> Iterator[tuple[Array, Array]]:
        spec, scale, zero = self._spec, self._minmax.scale[number], self._minmax.zero_point[number]
        for factor in FACTORS[np.flatnonzero(FACTORS > LEAST_FACTOR)[::STEP]]:
            smaller = np.maximum((scale * factor).astype(scale.dtype), np.finfo(scale.dtype).smallest_normal)
            for offset in (0,) if spec.symmetric else (0, -1, 1):
                yield smaller, np.clip(zero + offset, spec.qmin, spec.qmax).astype(np.int32)

    def _error(self, weight: Array, scale: Array, zero: Array) -> Array:
        return np.asarray(fake_quantize(weight, QuantParams(self._spec, scale, zero)) - weight, np.float32)
