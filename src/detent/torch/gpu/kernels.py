"""Triton kernels for GPUs: the arithmetic of docs/numerics.md in one pass over memory per operation.

Triton is optional. Without Triton this module can be imported, but its kernels cannot run. The kernels run on GPUs, and
on the CPU in Triton's interpreter, where tests compare them with the native kernels bit for bit. Tests also check the
code that Triton generates. Each rule below is needed because one of the two checks, or a GPU, shows wrong bits:

=============================== ======================================================================================
in a kernel                     reason
=============================== ======================================================================================
``div_rn``, never ``/`` (f32)   ``/`` is an approximate division on NVIDIA GPUs
half-even by adding 1.5 * 2^23  libdevice is not available in the interpreter; exact for up to 16 bits, as codes clamp
floor by rounding and comparing ``floor`` replaces subnormal numbers by zero on NVIDIA GPUs
bfloat16 as int16 bits          the interpreter truncates casts to bfloat16
clamp by ``where``              ``minimum`` and ``maximum`` drop NaN
launch without FMA              fused products change codes (``launch.OPTIONS``)
=============================== ======================================================================================

Arguments: ``x`` and ``g`` are dense; ``s`` and ``z`` have one element per parameter set. Up to three merged axes
(``Tiling.merged``) map elements to parameter sets: ``size``, ``block`` and ``grid`` for each axis. Elementwise kernels
process elements in memory order. Kernels that reduce process a tile of parameter sets (rows) by elements (columns).
"""

from __future__ import annotations

from typing import Any

import_error: Exception | None = None  # why Triton cannot be used
try:
    import triton.language as tl
    from triton import jit
except Exception as error:  # noqa: BLE001 - Triton is optional, and an installation that does not fit raises any error
    import_error = error
    tl: Any = None  # type: ignore[no-redef]  # kernels are plain functions that nobody calls

    def jit(function: Any) -> Any:
        """Return the function unchanged."""
        return function


__all__ = ["backward", "dequantize", "forward", "import_error", "learned_backward", "masked_backward", "minmax"]


@jit
def _plus(a, b):
    return a + b


@jit
def _smaller(a, b):
    return tl.where(b < a, b, a)


@jit
def _larger(a, b):
    return tl.where(b > a, b, a)


@jit
def _widen(raw, DTYPE: tl.constexpr):
    """Convert elements as they are in memory to the compute type."""
    if DTYPE == "bfloat16":
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        value = raw.to(tl.float32)
    else:
        value = raw
    return value


@jit
def _narrow(y, DTYPE: tl.constexpr, SIGNED_ZERO: tl.constexpr):
    """Round values of the compute type to elements as they are in memory; -0.0 becomes 0.0 unless SIGNED_ZERO."""
    if DTYPE == "bfloat16":
        bits = y.to(tl.int32, bitcast=True)
        nearest = (bits + 32767 + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(y == y, nearest, (bits >> 16) | 64)  # NaN stays NaN
        if not SIGNED_ZERO:
            nearest = tl.where((nearest & 32767) == 0, 0, nearest)
        result = nearest.to(tl.int16)
    else:
        if DTYPE == "float16":
            # The comparison keeps AMD's compiler from fusing a product with the conversion (v_fma_mixlo_f16), which
            # adds 0.0 and so loses the sign of -0.0.
            result = tl.where(y == y, y, float("nan")).to(tl.float16)
        else:
            result = y
        if not SIGNED_ZERO:
            result = tl.where(result == 0.0, 0.0, result)
    return result


@jit
def _half_even(t, WIDE: tl.constexpr):
    if WIDE:
        nearest = (t + 6755399441055744.0) - 6755399441055744.0
    else:
        nearest = (t + 12582912.0) - 12582912.0
    return nearest


@jit
def _floor(t, WIDE: tl.constexpr):
    nearest = _half_even(t, WIDE)
    return tl.where(nearest > t, nearest - 1.0, nearest)


@jit
def _product(word, factor: tl.constexpr):
    """Return the high and low words of a 32 x 32 bit product, in int64."""
    low = (word & 65535) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 65535) << 16) | (low & 65535)


@jit
def _random_words(index, seed_low, seed_high, step):
    """Return the first Philox4x32-10 word of each index, in int64."""
    index = index.to(tl.int64)
    zero = index & 0
    c0, c1, c2, c3 = index & 4294967295, index >> 32, zero + step, zero
    k0, k1 = zero + seed_low, zero + seed_high
    for _ in tl.static_range(10):
        high0, low0 = _product(c0, 3528531795)
        high1, low1 = _product(c2, 3449720151)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 2654435769) & 4294967295, (k1 + 3144134277) & 4294967295
    return c0


@jit
def _round(t, index, seed_low, seed_high, step, ROUNDING: tl.constexpr, WIDE: tl.constexpr):
    """Round to an integer; correct up to 2^22, beyond which every code is clamped."""
    if ROUNDING == "half_even":
        result = _half_even(t, WIDE)
    elif ROUNDING == "floor":
        result = _floor(t, WIDE)
    else:
        size = tl.where(t < 0.0, -t, t)
        whole = _floor(size, WIDE)
        fraction = size - whole
        if ROUNDING == "half_away":
            nearest = tl.where(fraction >= 0.5, whole + 1.0, whole)
            result = tl.where(t < 0.0, -nearest, nearest)
        else:
            threshold = (_random_words(index, seed_low, seed_high, step) >> 8).to(t.dtype) * 5.960464477539063e-08
            up = tl.where(t < 0.0, (fraction > 0.0) & (fraction < 1.0 - threshold), threshold < fraction)
            below = _floor(t, WIDE)
            result = tl.where(up, below + 1.0, below)
    return result


@jit
def _ratio(x, s, RECIPROCAL: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:  # float64 division is exact in Triton, and div_rn does not support float64
        if RECIPROCAL:
            t = x * (1.0 / s)
        else:
            t = x / s
    elif RECIPROCAL:
        t = x * tl.math.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    else:
        t = tl.math.div_rn(x, s)
    return t


@jit
def _unclamped(
    t, z, index, seed_low, seed_high, step, BEFORE: tl.constexpr, ROUNDING: tl.constexpr, WIDE: tl.constexpr
):
    if BEFORE:
        u = _round(t + z, index, seed_low, seed_high, step, ROUNDING, WIDE)
    else:
        u = _round(t, index, seed_low, seed_high, step, ROUNDING, WIDE) + z
    return u


@jit
def _clamp(u, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.where(u < LOW, LOW, tl.where(u > HIGH, HIGH, u))


@jit
def _table_code(t, bounds_ptr, inside, KIND: tl.constexpr, BOUNDS: tl.constexpr, STEPS: tl.constexpr):
    """Return the number of boundaries below t (floats: below its magnitude), by binary search."""
    if KIND == "float":
        key = tl.where(t < 0.0, -t, t)
    else:
        key = t
    code = inside.to(tl.int32) * 0
    for i in tl.static_range(STEPS):
        probe = code + (1 << (STEPS - 1 - i))
        exists = probe <= BOUNDS
        bound = tl.load(bounds_ptr + tl.where(exists, probe, 1) - 1)
        code = tl.where(exists & (bound < key), probe, code)
    return code


@jit
def _table_bits(t, code, KIND: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Add the sign bit of a float format to a code."""
    if KIND == "float":
        if WIDE:
            negative = t.to(tl.int64, bitcast=True) < 0
        else:
            negative = t.to(tl.int32, bitcast=True) < 0
        code = tl.where(negative, code + (1 << (BITS - 1)), code)
    return code


@jit
def _in_range(value, low, high, EXCLUSIVE: tl.constexpr):
    if EXCLUSIVE:
        result = (value > low) & (value < high)
    else:
        result = (value >= low) & (value <= high)
    return result


@jit
def _passes(x, t, u, s, z, LOW: tl.constexpr, HIGH: tl.constexpr, ON: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Return whether the gradient of each element passes; ``u`` is the code before clamping, or t for other formats."""
    if ON == "all":
        result = (t == t) | (t != t)  # True for every element
    elif ON == "value":
        result = _in_range(x, (LOW - z) * s, (HIGH - z) * s, EXCLUSIVE)
    else:
        result = _in_range(u, LOW, HIGH, EXCLUSIVE)
    return result


@jit
def _selected(passes, raw, DTYPE: tl.constexpr):
    """Return a gradient, as it is in memory, where it passes, and 0 elsewhere."""
    if DTYPE == "bfloat16":
        result = tl.where(passes, raw, 0)
    else:
        result = tl.where(passes, raw, 0.0)
    return result


@jit
def _set_of(i, size1, size2, block0, block1, block2, grid1, grid2, AXES: tl.constexpr):
    """Return the parameter set of each element, by its position in memory."""
    if AXES == 0:
        result = i * 0
    elif AXES == 1:
        result = i // block2
    elif AXES == 2:
        result = (i // size2 // block1) * grid2 + i % size2 // block2
    else:
        row = i // size2
        result = ((row // size1 // block0) * grid1 + row % size1 // block1) * grid2 + i % size2 // block2
    return result


@jit
def _indices(BLOCK: tl.constexpr, LONG: tl.constexpr):
    first = tl.program_id(0)
    if LONG:
        first = first.to(tl.int64)
    return first * BLOCK + tl.arange(0, BLOCK)


@jit
def forward(
    x_ptr, s_ptr, z_ptr, y_ptr, mask_ptr, bounds_ptr, levels_ptr, count,
    size1, size2, block0, block1, block2, grid1, grid2, seed_low, seed_high, step,
    OUTPUT: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROUNDING: tl.constexpr, RECIPROCAL: tl.constexpr, BEFORE: tl.constexpr, BITS: tl.constexpr,
    BOUNDS: tl.constexpr, STEPS: tl.constexpr, ON: tl.constexpr, EXCLUSIVE: tl.constexpr,
    FILL_LOW: tl.constexpr, AXES: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fake-quantize (OUTPUT "value"), also with one mask bit per element ("masked"), or quantize ("codes")."""
    WIDE: tl.constexpr = DTYPE == "float64"
    i = _indices(BLOCK, LONG)
    inside = i < count
    x = _widen(tl.load(x_ptr + i, mask=inside, other=0), DTYPE)
    p = _set_of(i, size1, size2, block0, block1, block2, grid1, grid2, AXES)
    s = tl.load(s_ptr + p, mask=inside, other=1.0)
    t = _ratio(x, s, RECIPROCAL, WIDE)
    if KIND == "integer":
        z = tl.load(z_ptr + p, mask=inside, other=0).to(s.dtype)
        u = _unclamped(t, z, i, seed_low, seed_high, step, BEFORE, ROUNDING, WIDE)
        q = _clamp(u, LOW, HIGH)
        if OUTPUT == "codes":
            if FILL_LOW:
                q = tl.where(q == q, q, LOW)  # NaN
            else:
                q = tl.where(q == q, q, z)  # NaN
            tl.store(y_ptr + i, q.to(tl.int32).to(y_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(y_ptr + i, _narrow((q - z) * s, DTYPE, False), mask=inside)
    else:
        z = s
        u = t
        if OUTPUT == "codes":
            if FILL_LOW:
                t = tl.where(t == t, t, LOW)  # NaN
            else:
                t = tl.where(t == t, t, 0.0)  # NaN
        code = _table_code(t, bounds_ptr, inside, KIND, BOUNDS, STEPS)
        code = _table_bits(t, code, KIND, BITS, WIDE)
        if OUTPUT == "codes":
            tl.store(y_ptr + i, code.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            value = tl.load(levels_ptr + code)
            value = tl.where(t == t, value, t)  # NaN
            tl.store(y_ptr + i, _narrow(value * s, DTYPE, KIND == "float"), mask=inside)
    if OUTPUT == "masked":
        passes = (_passes(x, t, u, s, z, LOW, HIGH, ON, EXCLUSIVE) & inside).to(tl.int32)
        eight = tl.reshape(passes, [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
        j = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        tl.store(mask_ptr + j, tl.reduce(eight, 1, _plus).to(tl.uint8), mask=j * 8 < count)


@jit
def dequantize(
    q_ptr, s_ptr, z_ptr, y_ptr, levels_ptr, count, size1, size2, block0, block1, block2, grid1, grid2,
    DTYPE: tl.constexpr, KIND: tl.constexpr, AXES: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the value of each code."""
    i = _indices(BLOCK, LONG)
    inside = i < count
    code = tl.load(q_ptr + i, mask=inside, other=0).to(tl.int32)
    p = _set_of(i, size1, size2, block0, block1, block2, grid1, grid2, AXES)
    s = tl.load(s_ptr + p, mask=inside, other=1.0)
    if KIND == "integer":
        z = tl.load(z_ptr + p, mask=inside, other=0)
        y = (code - z).to(s.dtype) * s
    else:
        y = tl.load(levels_ptr + code) * s
    tl.store(y_ptr + i, _narrow(y, DTYPE, KIND == "float"), mask=inside)


@jit
def backward(
    g_ptr, x_ptr, s_ptr, z_ptr, gx_ptr, count, size1, size2, block0, block1, block2, grid1, grid2,
    seed_low, seed_high, step,
    DTYPE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROUNDING: tl.constexpr,
    RECIPROCAL: tl.constexpr, BEFORE: tl.constexpr, ON: tl.constexpr, EXCLUSIVE: tl.constexpr,
    AXES: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradient of x with the estimator Clipped, whose mask is computed again from x."""
    WIDE: tl.constexpr = DTYPE == "float64"
    i = _indices(BLOCK, LONG)
    inside = i < count
    g = tl.load(g_ptr + i, mask=inside, other=0)
    x = _widen(tl.load(x_ptr + i, mask=inside, other=0), DTYPE)
    p = _set_of(i, size1, size2, block0, block1, block2, grid1, grid2, AXES)
    s = tl.load(s_ptr + p, mask=inside, other=1.0)
    z = tl.load(z_ptr + p, mask=inside, other=0).to(s.dtype)
    t = _ratio(x, s, RECIPROCAL, WIDE)
    u = t
    if KIND == "integer" and ON == "code":
        u = _unclamped(t, z, i, seed_low, seed_high, step, BEFORE, ROUNDING, WIDE)
    passes = _passes(x, t, u, s, z, LOW, HIGH, ON, EXCLUSIVE)
    tl.store(gx_ptr + i, _selected(passes, g, DTYPE), mask=inside)


@jit
def masked_backward(g_ptr, mask_ptr, gx_ptr, count, DTYPE: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Return the gradient of x from the mask bits of ``forward``."""
    i = _indices(BLOCK, LONG)
    inside = i < count
    g = tl.load(g_ptr + i, mask=inside, other=0)
    byte = tl.load(mask_ptr + i // 8, mask=inside, other=0).to(tl.int32)
    passes = ((byte >> (i % 8).to(tl.int32)) & 1) == 1
    tl.store(gx_ptr + i, _selected(passes, g, DTYPE), mask=inside)


@jit
def _position(row, j, size0, size1, size2, block0, block1, block2, grid1, grid2):
    """Return the position in memory of element j (in C order) of each parameter set, and whether it exists."""
    set2 = row % grid2
    set1 = row // grid2 % grid1
    set0 = row // grid2 // grid1
    span0 = tl.where(block0 < size0 - set0 * block0, block0, size0 - set0 * block0)
    span1 = tl.where(block1 < size1 - set1 * block1, block1, size1 - set1 * block1)
    span2 = tl.where(block2 < size2 - set2 * block2, block2, size2 - set2 * block2)
    j0 = j // span2 // span1
    j1 = j // span2 % span1
    j2 = j % span2
    where = ((set0 * block0 + j0) * size1 + set1 * block1 + j1) * size2 + set2 * block2 + j2
    return where, j0 < span0


@jit
def _tile(
    sets, parts, size0, size1, size2, block0, block1, block2, grid1, grid2,
    LONG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the elements of a program's tile: parameter sets (rows) by a part of the elements of each (columns).

    The result is the position in memory of each element and whether it exists; and for each row its parameter set and
    the position of its result.
    """
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    part = program % parts
    row = program // parts * ROWS + tl.arange(0, ROWS)
    j = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    where, exists = _position(row[:, None], j, size0, size1, size2, block0, block1, block2, grid1, grid2)
    return where, exists & (row[:, None] < sets), row, row * parts + part


@jit
def minmax(
    x_ptr, lo_ptr, hi_ptr, sets, parts, size0, size1, size2, block0, block1, block2, grid1, grid2,
    DTYPE: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the range of the finite elements in each part of each parameter set; (inf, -inf) if there are none."""
    where, exists, row, out = _tile(
        sets, parts, size0, size1, size2, block0, block1, block2, grid1, grid2, LONG, ROWS, COLUMNS
    )
    x = _widen(tl.load(x_ptr + where, mask=exists, other=0), DTYPE)
    finite = exists & (x > float("-inf")) & (x < float("inf"))
    lo = tl.reduce(tl.where(finite, x, float("inf")), 1, _smaller)
    hi = tl.reduce(tl.where(finite, x, float("-inf")), 1, _larger)
    tl.store(lo_ptr + out, tl.where(lo == 0.0, 0.0, lo), mask=row < sets)
    tl.store(hi_ptr + out, tl.where(hi == 0.0, 0.0, hi), mask=row < sets)


@jit
def _fold(terms, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr):
    """Add the upper half of each row to the lower half, until one column is left; short rows are padded with 0.0."""
    if COLUMNS < 1024:
        terms = terms + 0.0
    for i in tl.static_range(HALVINGS):
        terms = tl.reduce(tl.reshape(terms, [ROWS, 2, COLUMNS >> (i + 1)]), 1, _plus)
    return tl.reshape(terms, [ROWS])


@jit
def learned_backward(
    g_ptr, x_ptr, s_ptr, z_ptr, gx_ptr, ds_ptr, dz_ptr, bounds_ptr, levels_ptr, sets, parts,
    size0, size1, size2, block0, block1, block2, grid1, grid2, seed_low, seed_high, step,
    DTYPE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROUNDING: tl.constexpr,
    RECIPROCAL: tl.constexpr, BEFORE: tl.constexpr, BITS: tl.constexpr, BOUNDS: tl.constexpr,
    STEPS: tl.constexpr, ON: tl.constexpr, EXCLUSIVE: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of x, and the sums of the gradients of scale and zero point over 1024 elements each."""
    WIDE: tl.constexpr = DTYPE == "float64"
    i, exists, row, out = _tile(
        sets, parts, size0, size1, size2, block0, block1, block2, grid1, grid2, LONG, ROWS, COLUMNS
    )
    raw = tl.load(g_ptr + i, mask=exists, other=0)
    g = _widen(raw, DTYPE).to(tl.float64)
    x = _widen(tl.load(x_ptr + i, mask=exists, other=0), DTYPE)
    p = tl.where(exists, row[:, None], 0)
    s = tl.load(s_ptr + p)
    z = tl.load(z_ptr + p).to(s.dtype)
    t = _ratio(x, s, RECIPROCAL, WIDE)
    if KIND == "integer":
        u = _unclamped(t, z, i, seed_low, seed_high, step, BEFORE, ROUNDING, WIDE)
        value = _clamp(u, LOW, HIGH) - z
    else:
        u = t
        code = _table_code(t, bounds_ptr, exists, KIND, BOUNDS, STEPS)
        value = tl.load(levels_ptr + _table_bits(t, code, KIND, BITS, WIDE))
    passes = _passes(x, t, u, s, z, LOW, HIGH, ON, EXCLUSIVE)
    tl.store(gx_ptr + i, _selected(passes, raw, DTYPE), mask=exists)
    unclipped = _in_range(u, LOW, HIGH, False)
    is_counted = exists & (x == x)  # not NaN
    wide = value.to(tl.float64)
    terms = g * tl.where(unclipped, wide - t.to(tl.float64), wide)
    ds = _fold(tl.where(is_counted, terms, 0.0), ROWS, COLUMNS, HALVINGS)
    tl.store(ds_ptr + out, ds, mask=row < sets)
    if KIND == "integer":
        terms = -s.to(tl.float64) * g
        dz = _fold(tl.where(is_counted & (unclipped == 0), terms, 0.0), ROWS, COLUMNS, HALVINGS)
        tl.store(dz_ptr + out, dz, mask=row < sets)
