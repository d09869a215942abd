"""The registry: which kernel runs what, and what the installation says of itself."""

import dataclasses

import pytest

import detent as dt
from detent.kernels import registry

OPERATIONS = [
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "quantize",
    "quantize_backward",
]


@pytest.fixture
def threads():
    before = dt.get_num_threads()
    yield
    dt.set_num_threads(before)


def test_operations():
    assert sorted(registry.OPERATIONS) == OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_kernel(name):
    kernel = registry.find_kernel(name)
    assert (kernel.operation, kernel.backend) == (name, "reference")
    assert callable(kernel.function)
    assert registry.find_kernel(name) == kernel


def test_capabilities_name_machine_threads_and_backends():
    found = dt.capabilities()
    assert set(found.kernels) == {*OPERATIONS, "minmax", "tree_sum"}
    assert found.threads == dt.get_num_threads() >= 1
    text = str(found)
    assert all(word in text for word in (found.machine, "threads", "reference", *OPERATIONS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.threads = 9
    found.kernels["quantize"] = "other"
    assert dt.capabilities().kernels["quantize"] == "reference"


@pytest.mark.parametrize("name", ["minmax", "tree_sum"])
def test_reductions_need_no_plan(name):
    assert callable(registry.find_reduction(name))
    with pytest.raises(dt.UnsupportedError, match="expected one of"):
        registry.find_kernel(name)


@pytest.mark.usefixtures("threads")
def test_number_of_threads():
    dt.set_num_threads(3)
    assert dt.get_num_threads() == dt.capabilities().threads == 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_bad_number_of_threads(bad):
    before = dt.get_num_threads()
    with pytest.raises(dt.DetentError, match=r"at least 1, got"):
        dt.set_num_threads(bad)
    assert dt.get_num_threads() == before


@pytest.mark.parametrize("name", ["transpose", "", None])
def test_unknown_operation(name):
    with pytest.raises(dt.UnsupportedError, match="expected one of"):
        registry.find_kernel(name)
