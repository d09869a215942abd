"""Readiness of GPU kernels: whether they may run on a device, decided by a self-check on first use.

No GPU was available when the kernels were written. Therefore the first use of each device and dtype compares the
kernels with the CPU kernels, on a few thousand values next to ties. If a bit differs, or the kernels cannot be built or
launched, a warning names the device, and torch operations run instead: slower, with the same bits. Without Triton, or
with DETENT_GPU=0, torch operations run without a warning.

The self-check waits for the GPU and copies results to the host. While a CUDA graph is recorded, an unchecked device
uses torch operations; call an operation once before, as for any CUDA graph.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from detent.checks import FLOATS
from detent.kernels import minmax, register_gpu_report, uses_gpu_kernels
from detent.kernels.reference.operators import gradient_factor
from detent.ops import fake_quantize, fake_quantize_backward, fake_quantize_learned_backward, quantize
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.ste import Clipped, Estimator
from detent.torch import traced_namespace as xp
from detent.torch.arrays import FLOAT_TYPES, PLAIN_TYPES, to_array, to_tensor
from detent.torch.gpu import kernels, launch

__all__ = ["can_launch", "devices", "differences", "facts", "refusal", "report"]

DEVICE_TYPE = "cuda"  # PyTorch's name for NVIDIA and AMD GPUs
CHECKED_SPECS = ("int8", "uint8/axis0/affine/torch", "int4/group32/affine/compressed_tensors", "int16")
CHECKED_SHAPE = (16, 192)
CHECKED_SCALES = (0.0123, 0.3, 0.017)
NOT_CHECKED = "not checked yet"

_refusals: dict[tuple[torch.device, torch.dtype], str | None] = {}  # None: ready
_lock = threading.Lock()


def can_launch(x: Tensor, spec: QuantSpec, ste: Estimator | None = None) -> bool:
    """Return whether GPU kernels run an operation on x: x is an ordinary tensor on a GPU that passed the self-check."""
    return (
        x.device.type == DEVICE_TYPE
        and type(x) in PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and launch.supports(spec, tuple(x.shape), ste)
        and refusal(x.device, x.dtype) is None
    )


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why GPU kernels do not run on the device, or None if they do; the first call runs the self-check."""
    if not uses_gpu_kernels():
        return "DETENT_GPU=0 switches GPU kernels off"
    key = device, dtype
    if key in _refusals:
        return _refusals[key]
    if _is_recording():
        return NOT_CHECKED
    with _lock:
        if key not in _refusals:
            _refusals[key] = _check(device, dtype)
    return _refusals[key]


def _is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _check(device: torch.device, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if kernels.import_error is not None:
        reason = f"Triton cannot be imported: {_short(kernels.import_error)}"
    else:
        reason = _run_check(device, dtype)
    if not reason:
        return None
    warnings.warn(
        f"GPU kernels of detent are off for {FLOAT_TYPES[dtype]} on {device}: {reason}. Results are correct, but "
        "slower. Please report the output of `detent doctor --gpu`; DETENT_GPU=0 hides this warning",
        stacklevel=2,
    )
    return reason


def _run_check(device: torch.device, dtype: torch.dtype) -> str:
    """Run the self-check; return what is wrong, or an empty text."""
    try:
        wrong_results = differences(device, dtype)
    except Exception as error:  # noqa: BLE001 - drivers, compilers and Triton raise errors of any type
        return f"the self-check failed with {_short(error)}"
    return f"the self-check found wrong results: {', '.join(wrong_results)}" if wrong_results else ""


def _short(error: Exception) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def differences(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Compare GPU kernels with CPU kernels; return one text for each operation and spec with a different bit."""
    wrong_results = []
    for text in CHECKED_SPECS:
        spec = QuantSpec.parse(text)
        for operation, got, expected in _results(spec, device, dtype):
            count = _differing(got, expected)
            if count:
                wrong_results.append(f"{operation} of {spec} ({count} of {expected.size})")
    return wrong_results


def _results(
    spec: QuantSpec, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor | NDArray[Any], NDArray[Any]]]:
    """Yield the name, the GPU's result and the CPU's result of each operation."""
    x, g, params = _sample(spec, FLOAT_TYPES[dtype])
    data, gradient, s, z = (to_tensor(each).to(device) for each in (x, g, params.scale, params.zero_point))
    ste = Clipped()
    expected_gradient = fake_quantize_backward(g, x, params, ste=ste)
    yield "fake_quantize", launch.fake_quantize(data, s, z, spec), fake_quantize(x, params)
    yield "quantize", launch.quantize(data, s, z, spec, "qmin"), quantize(x, params, nan="qmin").codes
    codes = quantize(x, params, nan="qmin")
    values = launch.dequantize(to_tensor(codes.codes).to(device), s, z, spec, dtype)
    yield "dequantize", values, codes.dequantize()
    yield "backward", launch.fake_quantize_backward(gradient, data, s, z, spec, ste), expected_gradient
    y, mask, order = launch.fake_quantize_masked(data, s, z, spec, ste)
    yield "fake_quantize_masked", y, fake_quantize(x, params)
    yield "masked_backward", launch.masked_backward(gradient, mask, order), expected_gradient
    tiling = spec.granularity.tiling(x.shape)
    for name, got, expected in zip(("min", "max"), launch.minmax(data, spec), minmax(x, tiling), strict=False):
        yield name, got, np.asarray(expected)
    x[~np.isfinite(x)] = 0
    g[~np.isfinite(g)] = 0
    data, gradient = (to_tensor(each).to(device) for each in (x, g))
    factor = gradient_factor(xp, spec, tiling, None, s)
    learned = launch.fake_quantize_learned_backward(gradient, data, s, z, spec, ste, factor)
    for name, got, expected in zip("xsz", learned, fake_quantize_learned_backward(g, x, params, ste=ste), strict=True):
        yield f"learned gradient of {name}", got, expected


def _sample(spec: QuantSpec, dtype: str) -> tuple[NDArray[Any], NDArray[Any], QuantParams]:
    """Make data at and next to ties, with special values in front, a gradient and parameters."""
    rng = np.random.default_rng(0)
    tiling = spec.granularity.tiling(CHECKED_SHAPE)
    wide = "float64" if dtype == "float64" else "float32"
    scale = np.asarray(rng.choice(CHECKED_SCALES, size=tiling.scale_shape)).astype(wide)
    zero = np.full(tiling.scale_shape, 0 if spec.symmetric else (spec.qmin + spec.qmax) // 3, np.int32)
    reach = min(2 * int(spec.qmax), 2000)
    ties = rng.integers(-reach, reach, size=CHECKED_SHAPE) + 0.5
    exact = ties * np.broadcast_to(tiling.spread(scale), CHECKED_SHAPE).astype(np.float64)
    with np.errstate(all="ignore"):
        x = exact.astype(FLOATS[dtype])
        ulps = rng.integers(-1, 2, size=CHECKED_SHAPE)
        x = np.where(ulps == 0, x, np.nextafter(x, np.where(ulps < 0, -np.inf, np.inf).astype(x.dtype)))
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 6e4, -6e4]
        x.reshape(-1)[: len(special)] = np.array(special).astype(x.dtype)
    g = rng.normal(size=CHECKED_SHAPE).astype(x.dtype)
    g.reshape(-1)[-2:] = [np.inf, -0.0]
    return x, g, QuantParams(spec, scale, zero)


def _differing(got: Tensor | NDArray[Any], expected: NDArray[Any]) -> int:
    """Count the elements with different bits; NaNs may have different bits."""
    array = to_array(got.cpu()) if isinstance(got, Tensor) else got
    if array.dtype != expected.dtype or array.shape != expected.shape:
        return max(expected.size, 1)
    bits = f"u{expected.dtype.itemsize}"
    different = np.ascontiguousarray(array).view(bits) != np.ascontiguousarray(expected).view(bits)
    if expected.dtype.kind not in "iu":
        different &= ~(np.isnan(array) & np.isnan(expected))
    return int(different.sum())


def devices() -> list[torch.device]:
    """Return the GPUs that PyTorch can use."""
    return [torch.device(DEVICE_TYPE, i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def report(state: Callable[[torch.device, torch.dtype], str | None] | None = None) -> Mapping[str, str]:
    """Return what is known about the kernels on each GPU; ``state`` is ``refusal`` to run missing self-checks."""
    if not uses_gpu_kernels():
        return {"all GPUs": "off: DETENT_GPU=0"}
    return {
        f"{device} {torch.cuda.get_device_name(device)} {name}": (state or _last_state)(device, dtype) or "ready"
        for device in devices()
        for dtype, name in FLOAT_TYPES.items()
    }


def facts() -> dict[str, str]:
    """Run all self-checks; return the version of PyTorch, the GPUs, and the state of each GPU and dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the states contain the reasons
        states = report(refusal)
    version = torch.version
    toolkit = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "a build for CPUs"
    names = ", ".join(f"{device} {torch.cuda.get_device_name(device)}" for device in devices())
    return {"PyTorch": f"{torch.__version__}, {toolkit}", "GPUs": names or "none found", **states}


def _last_state(device: torch.device, dtype: torch.dtype) -> str | None:
    return _refusals.get((device, dtype), NOT_CHECKED)


register_gpu_report(report)
