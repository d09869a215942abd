"""Forward and backward passes of calibrated models do not wait for a GPU, and how many torch operations they need.

Models run on the meta device, whose tensors have no data: like a GPU, it takes the path of torch operations, and every
use of a value on the host is an error. Autograd of a CPU build of torch cannot run on fake CUDA tensors, so these only
run single operations.
"""

from __future__ import annotations

import pytest

import detent as dt

torch = pytest.importorskip("torch")

from fake_cuda import fake_cuda  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import traced  # noqa: E402

WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Recorder(TorchDispatchMode):
    """Records the names of operators, of those that wait for a device, and of those that write a large tensor."""

    def __init__(self, large: int = 1) -> None:
        super().__init__()
        self.large = large
        self.names: list[str] = []
        self.waits: list[str] = []
        self.passes: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        self.names.append(name)
        devices = {each.device.type for each in args if isinstance(each, torch.Tensor)}
        to_host = isinstance(result, torch.Tensor) and result.device.type == "cpu" and devices & {"cuda", "meta"}
        if name in WAITING or to_host:
            self.waits.append(name)
        if isinstance(result, torch.Tensor) and not operator.is_view and result.numel() >= self.large:
            self.passes.append(name)
        return result


def prepared(mode: dt.ScaleMode) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 4)
    )
    types = ("Conv2d", "Linear")
    rule = dt.Rule(types=types, weight="int8/axis0", input="uint8/tensor/affine", output="int8", mode=mode)
    qt.prepare(model, dt.Recipe([rule]))
    with qt.calibrating(model):
        model(torch.randn(2, 3, 5, 5))
    return model


@pytest.mark.parametrize("mode", [dt.Fixed(), dt.EMA(0.9), dt.Learned(), dt.PerBatch()], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_a_calibrated_model_does_not_wait(mode: dt.ScaleMode, training: bool) -> None:
    model = prepared(mode).train(training).to("meta")
    x = torch.empty(2, 3, 5, 5, device="meta", requires_grad=True)
    with Recorder() as recorder:
        y = model(x)
        y.backward(torch.empty_like(y))
    assert len(recorder.names) > 40
    assert recorder.waits == []
    assert x.grad.device.type == "meta"


@pytest.mark.parametrize(
    "text", ["int8", "uint8/axis0/affine/torch", "int4/group32/affine", "float8_e4m3fn", "nf4/group32"]
)
def test_operations_on_fake_cuda_tensors_do_not_wait(text: str) -> None:
    spec = dt.QuantSpec.parse(text)
    with fake_cuda(compiling=False) as fake, fake, Recorder() as recorder:
        x = torch.empty(64, 96, device="cuda:0")
        scale, zero_point = traced.derive(spec, *traced.minmax(x, spec))
        y = traced.fake_quantize(x, scale, zero_point, spec)
        gradients = traced.fake_quantize_learned_backward(y, x, scale, zero_point, spec, dt.ste.Clipped())
    assert all(each.device.type == "cuda" for each in (y, *gradients))
    assert len(recorder.names) > 20
    assert recorder.waits == []


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("int8", torch.float32, (12, 8)),
        ("uint8/axis0/affine", torch.bfloat16, (14, 9)),
        ("int4/group32", torch.float32, (14, 10)),
        ("int4/group32", torch.bfloat16, (16, 11)),
    ],
)
def test_passes_over_memory_without_kernels(text: str, dtype: torch.dtype, expected: tuple[int, int]) -> None:
    """Without Triton, fake quantization is 12 to 16 operations that write the whole tensor; docs/howto/gpu.md."""
    spec = dt.QuantSpec.parse(text)
    shape = spec.granularity.tiling((64, 96)).scale_shape
    with fake_cuda(compiling=False) as fake, fake:
        x = torch.empty(64, 96, dtype=dtype, device="cuda:0")
        parameters = torch.empty(shape, device="cuda:0"), torch.empty(shape, dtype=torch.int32, device="cuda:0")
        with Recorder(x.numel()) as forward:
            traced.fake_quantize(x, *parameters, spec)
        with Recorder(x.numel()) as backward:
            traced.fake_quantize_backward(x, x, *parameters, spec, dt.ste.Clipped())
    assert (len(forward.passes), len(backward.passes)) == expected


def test_a_copy_to_the_host_is_seen() -> None:
    with fake_cuda(compiling=False) as fake, fake, Recorder() as recorder:
        torch.empty(3, device="cuda:0").to("cpu")
    assert recorder.waits
