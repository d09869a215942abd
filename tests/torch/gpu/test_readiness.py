"""When GPU kernels run, and what runs otherwise. No GPU and, for most tests, no Triton is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from unittest import mock

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from fake_cuda import fake_cuda  # noqa: E402
from torch_bits import assert_same, make_case, tensor  # noqa: E402

import detent.torch as qt  # noqa: E402
from detent.torch import operator, traced  # noqa: E402
from detent.torch.gpu import kernels, launch, readiness  # noqa: E402

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
        # errors of Triton without a C compiler, and of a version that lacks a function
        (
            mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nhint")),
            "RuntimeError: Failed to find C compiler",
        ),
        (mock.Mock(side_effect=AttributeError("no attribute 'div_rn'")), "AttributeError: no attribute 'div_rn'"),
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
        mock.patch.object(kernels, "import_error", None),
        mock.patch.object(readiness, "differences", check),
    ):
        with pytest.warns(UserWarning, match=f"off for float32 on cpu: the self-check .*{expected}"):
            y = traced.fake_quantize(x, s, z, SPEC)
        assert_same(traced.fake_quantize(x, s, z, SPEC), dt.fake_quantize(case.x, case.params))
    assert_same(y, dt.fake_quantize(case.x, case.params))
    assert check.call_count == 1


def test_a_triton_that_cannot_be_imported() -> None:
    x, s, z = torch.ones(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int32)
    with (
        cpu_as_gpu(),
        mock.patch.object(readiness, "find_spec", return_value=object()),
        mock.patch.object(kernels, "import_error", AttributeError("libtriton does not fit")),
        pytest.warns(UserWarning, match="off for float32 on cpu: Triton cannot be imported: AttributeError: libtriton"),
    ):
        assert_same(traced.fake_quantize(x, s, z, SPEC), np.ones((3, 4), np.float32))


def test_an_import_of_triton_may_fail_with_any_error() -> None:
    finder = mock.Mock()
    finder.find_spec.side_effect = RuntimeError("wrong version of libtriton")
    others = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "triton"}
    spec = spec_from_file_location("copy_of_kernels", kernels.__file__)
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, others, clear=True), mock.patch.object(sys, "meta_path", [finder]):
        spec.loader.exec_module(module)
    assert repr(module.import_error) == "RuntimeError('wrong version of libtriton')"
    assert callable(module.forward)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU driver")
def test_without_a_driver_torch_operations_run() -> None:
    """Triton itself runs here: it finds no driver."""
    x, s, z = torch.ones(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int32)
    with cpu_as_gpu(), pytest.warns(UserWarning, match=r"self-check failed with \w+: .*driver"):
        assert_same(traced.fake_quantize(x, s, z, SPEC), np.ones((3, 4), np.float32))


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


@pytest.mark.parametrize(("data", "parameters"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
@pytest.mark.parametrize("wrong", ["scale", "zero_point"])
def test_tensors_on_two_devices(data: str, parameters: str, wrong: str) -> None:
    with fake_cuda(compiling=False) as fake, fake:
        x = torch.empty(3, 4, device=data)
        scale = torch.empty(3, device=parameters if wrong == "scale" else data)
        zero_point = torch.empty(3, dtype=torch.int32, device=parameters if wrong == "zero_point" else data)
        with pytest.raises(dt.errors.ParamsError, match=rf"x on {data}, but {wrong} on {parameters}, .*model\.to\("):
            operator.apply_traced(x, scale, zero_point, SPEC, dt.ste.Clipped())
        assert not traced.runs_on_gpu_kernels(x, scale, zero_point, SPEC, None, 0)


@pytest.mark.parametrize("learned", [False, True])
def test_an_empty_tensor(learned: bool) -> None:
    """Torch operations process it: there is no kernel for it, and no self-check."""
    x = torch.empty(3, 0, requires_grad=True)
    scale, zero_point = torch.ones(3, requires_grad=learned), torch.zeros(3, dtype=torch.int32)
    with cpu_as_gpu(), mock.patch.object(readiness, "_check", side_effect=AssertionError):
        y = operator.apply_traced(x, scale, zero_point, SPEC, dt.ste.Clipped(), learned=learned)
        y.backward(torch.empty(3, 0))
        assert y.shape == x.grad.shape == (3, 0)
        lo, hi = traced.minmax(x, SPEC)
    assert lo.tolist() == [np.inf] * 3
    assert hi.tolist() == [-np.inf] * 3
    assert not learned or scale.grad.tolist() == [0.0] * 3


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
