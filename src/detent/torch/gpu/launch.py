"""Launches of GPU kernels: everything about an operation is decided once per shape, dtype and spec, then launched.

The functions have the arguments and results of ``detent.torch.traced``, and the same bits. They neither check their
arguments nor record gradients. Nothing waits for the GPU: no value is copied to the host, so CUDA graphs can record the
launches. The first call for a format with a table copies the table to the GPU.

Elements are processed in memory order if the memory is dense (``arrays.order_of``); other tensors are copied first.
"""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detent.errors import UnsupportedError
from detent.granularity import PerTensor, Tiling
from detent.kernels.reference.elements import boundaries
from detent.kernels.reference.operators import NaNFill
from detent.kernels.reference.sets import BLOCK as SUM_BLOCK
from detent.kernels.reference.sets import tree_sum_of_blocks
from detent.spec import QuantSpec
from detent.ste import Clipped, Estimator, Identity
from detent.torch import traced_namespace as xp
from detent.torch.arrays import FLOAT_TYPES, Order, order_of, scale_dtype
from detent.torch.gpu import kernels

__all__ = [
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "fake_quantize_masked",
    "masked_backward",
    "minmax",
    "quantize",
    "supports",
    "supports_sums",
]

MAX_AXES = 3
BLOCK = 1024  # elements of a program
MAX_COLUMNS = 4096  # elements of a row in minmax
ANY_SPEC = QuantSpec("int8")  # for kernels that do not depend on a spec
LONG_INDEX = 1 << 30  # from here on, positions are computed in int64
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}  # a fused multiply-add would round once instead of twice


class Layout(NamedTuple):
    """The parameter sets of a dense array: up to three merged axes, padded in front with axes of length 1."""

    numbers: dict[str, int]  # size, block and grid of each axis
    axes: int  # 0 if there is only one parameter set
    elements: int
    sets: int
    set_size: int  # elements of the largest parameter set
    is_ragged: bool  # whether parameter sets differ in size


@lru_cache(maxsize=1024)
def _layout(tiling: Tiling) -> Layout | None:
    """Return the layout, or None if the array has too many merged axes."""
    merged = tiling.merged()
    if len(merged.shape) > MAX_AXES:
        return None
    pad = (1,) * (MAX_AXES - len(merged.shape))
    sizes, blocks, grids = (pad + axes for axes in (merged.shape, merged.block, merged.grid))
    numbers = {
        f"{name}{i}": values[i] for name, values in (("size", sizes), ("block", blocks)) for i in range(MAX_AXES)
    }
    numbers |= {"grid1": grids[1], "grid2": grids[2]}
    largest = prod(min(block, max(size, 1)) for block, size in zip(blocks, sizes, strict=True))
    sets, count = prod(grids), prod(sizes)
    return Layout(numbers, len(merged.shape) if sets > 1 else 0, count, sets, largest, count != sets * largest)


def supports(spec: QuantSpec, shape: tuple[int, ...], ste: Estimator | None = None) -> bool:
    """Return whether there are kernels for the spec, the shape and the estimator."""
    is_masked = ste is None or isinstance(ste, Identity | Clipped)
    return is_masked and 0 not in shape and _layout(spec.granularity.tiling(shape)) is not None


def supports_sums(spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    """Return whether learned gradients have a kernel: parameter sets have equal sizes, or at most 1024 elements.

    Otherwise, additional block sums of 0.0 in a shorter parameter set would change a sum of -0.0.
    """
    layout = _layout(spec.granularity.tiling(shape))
    return layout is not None and (layout.set_size <= SUM_BLOCK or not layout.is_ragged)


@lru_cache(maxsize=1024)
def _constants(spec: QuantSpec, dtype: torch.dtype, ste: Estimator | None) -> dict[str, Any]:
    """Return the constants of an operation that are part of the generated code."""
    form = spec.format
    bounds = () if form.is_integer else boundaries(form, "float64" if dtype == torch.float64 else "float32")
    on = "all"
    if isinstance(ste, Clipped):
        on = "value" if ste.on == "value" and form.is_integer else "code"
    return {
        "DTYPE": FLOAT_TYPES[dtype],
        "KIND": form.kind,
        "LOW": float(spec.qmin),
        "HIGH": float(spec.qmax),
        "ROUNDING": spec.rounding.kind,
        "RECIPROCAL": form.is_integer and spec.convention.division == "reciprocal",
        "BEFORE": spec.convention.zero_point == "before_round",
        "BITS": form.bits,
        "BOUNDS": len(bounds),
        "STEPS": len(bounds).bit_length(),
        "ON": on,
        "EXCLUSIVE": isinstance(ste, Clipped) and ste.bounds == "exclusive",
    }


@lru_cache(maxsize=64)
def _tables(spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the boundaries and levels of a format; one unused element each for integers."""
    form = spec.format
    if form.is_integer:
        return torch.zeros(1, dtype=dtype, device=device), torch.zeros(1, dtype=dtype, device=device)
    name = "float64" if dtype == torch.float64 else "float32"
    bounds, levels = boundaries(form, name), form.levels
    return torch.tensor(bounds, dtype=dtype, device=device), torch.tensor(levels, dtype=dtype, device=device)


class _Call(NamedTuple):
    """Everything that an elementwise operation on one shape, dtype and spec needs beside its tensors."""

    layout: Layout
    numbers: dict[str, Any]
    constants: dict[str, Any]
    programs: int


@lru_cache(maxsize=4096)
def _call(tiling: Tiling, dtype: torch.dtype, spec: QuantSpec, ste: Estimator | None) -> _Call:
    layout = _layout(tiling)
    if layout is None:
        raise UnsupportedError(
            f"got data of shape {tiling.shape} with granularity {spec.granularity}, but GPU kernels support at most "
            f"{MAX_AXES} merged axes: use torch operations (DETENT_GPU=0)"
        )
    is_long = layout.elements >= LONG_INDEX
    constants = _constants(spec, dtype, ste) | {"AXES": layout.axes, "LONG": is_long, "BLOCK": BLOCK}
    seed = spec.rounding.seed if spec.rounding.kind == "stochastic" else 0
    words = {"seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32}
    return _Call(layout, layout.numbers | words, constants, -(-layout.elements // BLOCK))


def _launch(
    kernel: Any, call: _Call, device: torch.device, tensors: dict[str, Any], tile: "_Tile | None" = None
) -> None:
    """Launch a kernel with its tensors, and with those numbers and constants of the call and the tile that it has."""
    values = call.numbers | call.constants | ({} if tile is None else tile.constants)
    arguments = tensors | {name: value for name, value in values.items() if name in kernel.arg_names}
    programs = (call.programs if tile is None else tile.programs,)
    if device.type != "cuda":  # Triton's interpreter, in tests; it has no options
        kernel[programs](**arguments)
        return
    with torch.cuda.device(device):
        kernel[programs](**arguments, **OPTIONS)


def _bits(x: Tensor) -> Tensor:
    """Return bfloat16 elements as int16, as kernels read and write them."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


class _Laid(NamedTuple):
    """A tensor in its memory order, with the spec for this order."""

    order: Order
    data: Tensor
    tiling: Tiling


def _laid(x: Tensor, spec: QuantSpec) -> _Laid:
    order = order_of(x, spec)
    data = order.lay(x.detach())
    return _Laid(order, data, order.spec.granularity.tiling(tuple(data.shape)))


def _parameters(x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    return scale.detach().to(scale_dtype(x)).contiguous(), zero_point.detach().to(torch.int32).contiguous()


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, step: int = 0) -> Tensor:
    """Return ``dequantize(quantize(x))`` in x's dtype; NaN stays NaN. One read and one write of memory."""
    laid = _laid(x, spec)
    y = torch.empty_like(laid.data)
    _forward("value", laid, y, (scale, zero_point), step)
    return laid.order.restore(y)


def fake_quantize_masked(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int = 0
) -> tuple[Tensor, Tensor, Order]:
    """Fake-quantize x; return the result, one mask bit per element, and the memory order of both."""
    laid = _laid(x, spec)
    y = torch.empty_like(laid.data)
    mask = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
    _forward("masked", laid, y, (scale, zero_point), step, mask=mask, ste=ste)
    return laid.order.restore(y), mask, laid.order


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    fill: NaNFill = "zero_point",
    step: int = 0,
) -> Tensor:
    """Return the code of each element; ``fill`` is the code of NaN. One read and one write of memory."""
    laid = _laid(x, spec)
    storage = getattr(torch, spec.format.storage) if spec.format.is_integer else torch.uint8
    q = torch.empty(laid.data.shape, dtype=storage, device=x.device)
    _forward("codes", laid, q, (scale, zero_point), step, fill=fill)
    return laid.order.restore(q)


def _forward(
    output: str,
    laid: _Laid,
    out: Tensor,
    parameters: tuple[Tensor, Tensor],
    step: int,
    *,
    mask: Tensor | None = None,
    ste: Estimator | None = None,
    fill: NaNFill = "zero_point",
) -> None:
    spec, data = laid.order.spec, laid.data
    call = _call(laid.tiling, data.dtype, spec, ste)
    s, z = _parameters(data, *parameters)
    bounds, levels = _tables(spec, s.dtype, data.device)
    arguments = {
        "x_ptr": _bits(data),
        "s_ptr": s,
        "z_ptr": z,
        "y_ptr": _bits(out),
        "mask_ptr": z if mask is None else mask,
        "bounds_ptr": bounds,
        "levels_ptr": levels,
        "count": call.layout.elements,
        "step": step,
        "OUTPUT": output,
        "FILL_LOW": fill == "qmin",
    }
    _launch(kernels.forward, call, data.device, arguments)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Return the value of each code. One read and one write of memory."""
    order = order_of(codes, spec)
    data = order.lay(codes)
    y = torch.empty(data.shape, dtype=dtype, device=codes.device)
    call = _call(order.spec.granularity.tiling(tuple(data.shape)), dtype, order.spec, None)
    s, z = _parameters(y, scale, zero_point)
    arguments = {"q_ptr": data, "s_ptr": s, "z_ptr": z, "y_ptr": _bits(y), "count": call.layout.elements}
    arguments["levels_ptr"] = _tables(spec, s.dtype, codes.device)[1]
    _launch(kernels.dequantize, call, codes.device, arguments)
    return order.restore(y)


def fake_quantize_backward(
    g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int = 0
) -> Tensor:
    """Return the gradient of x given the gradient g of ``fake_quantize``. Two reads and one write of memory."""
    if isinstance(ste, Identity):
        return g.detach().clone()
    order, data, tiling = _laid(x, spec)
    gradient = order.lay(g.detach())
    gx = torch.empty_like(gradient)
    call = _call(tiling, data.dtype, order.spec, ste)
    arguments = _gradient_arguments(gradient, data, gx, (scale, zero_point), step)
    arguments["count"] = call.layout.elements
    _launch(kernels.backward, call, data.device, arguments)
    return order.restore(gx)


def _gradient_arguments(
    g: Tensor, x: Tensor, gx: Tensor, parameters: tuple[Tensor, Tensor], step: int
) -> dict[str, Any]:
    s, z = _parameters(x, *parameters)
    return {"g_ptr": _bits(g), "x_ptr": _bits(x), "s_ptr": s, "z_ptr": z, "gx_ptr": _bits(gx), "step": step}


def masked_backward(g: Tensor, mask: Tensor, order: Order) -> Tensor:
    """Return the gradient of x, given the output gradient g and the mask of ``fake_quantize_masked``."""
    gradient = order.lay(g.detach())
    gx = torch.empty_like(gradient)
    call = _call(PerTensor().tiling(tuple(gradient.shape)), g.dtype, ANY_SPEC, None)
    arguments = {"g_ptr": _bits(gradient), "mask_ptr": mask, "gx_ptr": _bits(gx), "count": call.layout.elements}
    _launch(kernels.masked_backward, call, g.device, arguments)
    return order.restore(gx)


def minmax(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the range of each parameter set's finite elements; (inf, -inf) if there are none. One read of memory."""
    order, data, tiling = _laid(x, spec)
    call = _call(tiling, data.dtype, order.spec, None)
    tile = _tile(call.layout, MAX_COLUMNS)
    lo, hi = torch.empty((2, call.layout.sets, tile.parts), dtype=scale_dtype(x), device=x.device)
    arguments = {"x_ptr": _bits(data), "lo_ptr": lo, "hi_ptr": hi}
    _launch(kernels.minmax, call, data.device, arguments, tile)
    shape = tiling.scale_shape
    return lo.amin(1).reshape(shape), hi.amax(1).reshape(shape)


class _Tile(NamedTuple):
    """Parameter sets (rows) by elements (columns) of one program; a large parameter set is divided into parts."""

    parts: int
    programs: int
    constants: dict[str, int]


def _tile(layout: Layout, max_columns: int) -> _Tile:
    columns = min(max_columns, 1 << (layout.set_size - 1).bit_length())
    parts = -(-layout.set_size // columns)
    rows = min(max(1, BLOCK // columns), 1 << (layout.sets - 1).bit_length())
    constants = {"ROWS": rows, "COLUMNS": columns, "HALVINGS": columns.bit_length() - 1}
    constants |= {"sets": layout.sets, "parts": parts}
    return _Tile(parts, -(-layout.sets // rows) * parts, constants)


def fake_quantize_learned_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    ste: Estimator,
    factor: Tensor,
    step: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and zero point; ``factor`` multiplies the last two. Two reads and one write.

    Sums of 1024 elements are computed with the gradient of x; then these sums are added in the same fixed order.
    """
    data, gradient = x.detach().contiguous(), g.detach().contiguous()
    gx = torch.empty_like(gradient)
    tiling = spec.granularity.tiling(tuple(data.shape))
    call = _call(tiling, data.dtype, spec, ste)
    tile = _tile(call.layout, SUM_BLOCK)
    bounds, levels = _tables(spec, scale_dtype(data), data.device)
    ds, dz = torch.empty((2, call.layout.sets, tile.parts), dtype=torch.float64, device=x.device)
    arguments = _gradient_arguments(gradient, data, gx, (scale, zero_point), step)
    arguments |= {"ds_ptr": ds, "dz_ptr": dz, "bounds_ptr": bounds, "levels_ptr": levels}
    _launch(kernels.learned_backward, call, data.device, arguments, tile)
    shape = tiling.scale_shape
    gs = (tree_sum_of_blocks(ds, xp).reshape(shape) * factor).to(scale.dtype)
    if not spec.format.is_integer:
        return gx, gs, torch.zeros_like(gs)
    return gx, gs, (tree_sum_of_blocks(dz, xp).reshape(shape) * factor).to(scale.dtype)
