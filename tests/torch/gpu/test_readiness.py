"""When GPU kernels run, and what runs otherwise. No GPU and, for most tests, no Triton is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch_bits import assert_same, make_case, tensor  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import operator, traced  # noqa: E402
from detent.torch.gpu import launch, readiness  # noqa: E402

CPU = torch.device("cpu")
SPEC = dt.QuantSpec.parse("uint8/axis0/affine")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make test-gpu")


@contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Treat CPU tensors as tensors on a GPU, with no self-check done yet."""
    with (
        mock.patch.object(readiness, "DEVICE_TYPE", "cpu"),
        mock.patch.object(readiness, "_refusals", {}),
        mock.patch.object(operator, "is_plain", return_value=False),
    ):
        yield


def test_no_gpu() -> None:
    assert not readiness.can_launch(torch.ones(3), SPEC)
    if not torch.cuda.is_available():
        assert readiness.devices() == []
        assert dt.capabilities().gpu == {}


def test_without_triton_torch_operations_run(recwarn: pytest.WarningsRecorder) -> None:
    case = make_case(SPEC, (3, 50))
    x, s, z = map(tensor, (case.x, case.params.scale, case.params.zero_point))
    with cpu_as_gpu(), mock.patch.object(readiness, "find_spec", return_value=None):
        y = traced.fake_quantize(x, s, z, SPEC)
        assert readiness.refusal(CPU, torch.float32) == "Triton is not installed: pip install triton"
    assert_same(y, dt.fake_quantize(case.x, case.params))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (mock.Mock(side_effect=RuntimeError("no C compiler\nhint")), "RuntimeError: no C compiler"),
        (mock.Mock(side_effect=AssertionError()), "failed with AssertionError"),
        (mock.Mock(return_value=["quantize of int8 (3 of 9)"]), r"wrong results: quantize of int8 \(3 of 9\)"),
    ],
)
def test_a_failed_check_warns_once_and_torch_operations_run(check: mock.Mock, expected: str) -> None:
    case = make_case(SPEC, (3, 50))
    x, s, z = map(tensor, (case.x, case.params.scale, case.params.zero_point))
    with (
        cpu_as_gpu(),
        mock.patch.object(readiness, "find_spec", return_value=object()),
        mock.patch.object(readiness, "differences", check),
    ):
        with pytest.warns(UserWarning, match=f"off for float32 on cpu: the self-check .*{expected}"):
            y = traced.fake_quantize(x, s, z, SPEC)
        assert_same(traced.fake_quantize(x, s, z, SPEC), dt.fake_quantize(case.x, case.params))
    assert_same(y, dt.fake_quantize(case.x, case.params))
    assert check.call_count == 1


def test_while_a_cuda_graph_is_recorded_nothing_is_checked() -> None:
    with cpu_as_gpu(), mock.patch.object(readiness, "_is_recording", return_value=True):
        assert readiness.refusal(CPU, torch.float32) == readiness.NOT_CHECKED
        assert not readiness._refusals


def test_the_environment_switches_kernels_off() -> None:
    script = (
        "import torch, detent.torch; from detent.torch.gpu import readiness;"
        "print(readiness.refusal(torch.device('cuda', 0), torch.float32)); print(readiness.report())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={"DETENT_GPU": "0"}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "DETENT_GPU=0 switches GPU kernels off\n{'all GPUs': 'off: DETENT_GPU=0'}\n"


def test_a_wrong_environment_variable() -> None:
    dt.kernels.uses_gpu_kernels.cache_clear()
    with mock.patch.dict("os.environ", DETENT_GPU="yes"), pytest.raises(dt.errors.SpecError, match="DETENT_GPU='yes'"):
        dt.kernels.uses_gpu_kernels()
    dt.kernels.uses_gpu_kernels.cache_clear()


@pytest.mark.parametrize(
    ("spec", "shape", "ste"),
    [
        ("int8", (0, 3), None),
        ("int8", (3,), dt.ste.HardTanh()),
        ("int8", (3,), dt.ste.Tanh()),
        ("int8/block2x2x2x2", (4, 4, 4, 4), None),
    ],
)
def test_what_kernels_do_not_support(spec: str, shape: tuple[int, ...], ste: dt.ste.Estimator | None) -> None:
    assert not launch.supports(dt.QuantSpec.parse(spec), shape, ste)


def test_large_parameter_sets_of_different_sizes_have_no_sums() -> None:
    spec = dt.QuantSpec("int8", "group2048")
    assert launch.supports_sums(spec, (4096,))
    assert not launch.supports_sums(spec, (4000,))
    assert launch.supports_sums(dt.QuantSpec("int8", "group512"), (4000,))


def test_an_operation_is_decided_once() -> None:
    tiling = SPEC.granularity.tiling((3, 50))
    first = launch._call(tiling, torch.float32, SPEC, None)
    assert launch._call(tiling, torch.float32, SPEC, None) is first


def test_positions_of_large_arrays_are_int64() -> None:
    small, large = (
        launch._call(dt.PerTensor().tiling((n,)), torch.float16, dt.QuantSpec("int8"), None) for n in (9, 2**31)
    )
    assert not small.constants["LONG"]
    assert large.constants["LONG"]
    assert large.programs == 2**21


def test_parameters_on_a_different_device() -> None:
    x, z = torch.ones(4), torch.zeros((), dtype=torch.int32)
    scale = mock.MagicMock(spec=torch.Tensor, device=torch.device("cuda", 0))
    with pytest.raises(dt.errors.ParamsError, match=r"got x on cpu, but scale on cuda:0, .*model\.to\('cpu'\)"):
        operator._check_device(x, scale, z)


# The whole path, with kernels in Triton's interpreter


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_passes_in_the_interpreter(dtype: torch.dtype) -> None:
    from interpreted import interpreted

    with interpreted():
        assert readiness.differences(CPU, dtype) == []


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_self_check_sees_a_wrong_kernel() -> None:
    from interpreted import interpreted, load_kernels

    reciprocal = "t = x * tl.math.div_rn(tl.full(s.shape, 1.0, tl.float32), s)"
    with interpreted(load_kernels(interpret=True, replace=("t = tl.math.div_rn(x, s)", reciprocal))):
        found = readiness.differences(CPU, torch.float32)
    assert any("fake_quantize of int16" in each for each in found)
    assert not any("torch" in each for each in found)  # its convention multiplies by the reciprocal


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_through_the_kernels(learned: bool) -> None:
    from interpreted import interpreted

    case = make_case(SPEC, (3, 50), nasty=False)
    results = []
    for gpu in (False, True):
        x = tensor(case.x).requires_grad_()
        scale = tensor(case.params.scale).requires_grad_(learned)
        options = {"scale": scale} if learned else {}
        if gpu:
            with interpreted(), cpu_as_gpu(), mock.patch.object(readiness, "_check", return_value=None):
                y = qt.fake_quantize(x, case.params, **options)
                y.backward(tensor(case.g))
            assert ("Masked" in type(y.grad_fn).__name__) != learned
        else:
            y = qt.fake_quantize(x, case.params, **options)
            y.backward(tensor(case.g))
        results.append((y.detach(), x.grad, scale.grad if learned else torch.zeros(1)))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranges_through_the_kernels() -> None:
    from interpreted import interpreted

    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    counted = mock.patch.object(launch, "minmax", wraps=launch.minmax)
    with interpreted(), cpu_as_gpu(), mock.patch.object(readiness, "_check", return_value=None), counted as minmax:
        y = qt.fake_quantize(tensor(x), SPEC)
    assert minmax.call_count == 1
    assert_same(y, dt.fake_quantize(x, SPEC))
