"""The registry: the kernel of each problem, and the capabilities of the installation."""

import dataclasses
import re
import subprocess
import sys
from itertools import product

import pytest

import detent as dt
from detent import kernels
from detent.checks import FLOATS
from detent.convention import PRESETS
from detent.kernels.registry import PARTS

OPERATIONS = [
    "dequantize",
    "dequantize_backward",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "fake_quantize_masked",
    "fake_quantize_masked_backward",
    "quantize",
    "quantize_backward",
]


@pytest.fixture
def threads():
    before = dt.get_num_threads()
    yield
    dt.set_num_threads(before)


def test_operations():
    assert sorted(kernels.OPERATIONS) == OPERATIONS


def problem(operation, spec="int8", ste=None):
    return dt.Plan.select(operation, shape=(4,), dtype="float32", spec=spec, ste=ste)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_reference_kernel(name):
    with dt.use_kernels("reference"):
        assert problem(name).kernel.backend == "reference"


def test_capabilities_name_machine_level_threads_and_backends():
    caps = dt.capabilities()
    assert set(caps.kernels) == {*OPERATIONS, *PARTS}
    assert set(caps.table) == set(product(OPERATIONS, FLOATS, PRESETS))
    assert caps.threads == dt.get_num_threads() >= 1
    text = str(caps)
    assert all(word in text for word in (caps.machine, caps.level, "threads", *OPERATIONS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        caps.threads = 9


def test_capabilities_follow_the_choice():
    with dt.use_kernels("reference"):
        assert set(dt.capabilities().kernels.values()) == {"reference"}


def test_the_doctor_prints_them():
    run = [sys.executable, "-m", "detent", "doctor", "--all"]
    text = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.match(rf"detent +{re.escape(dt.__version__)}, ", text)
    assert all(name in text for name in (*OPERATIONS, *PARTS, *PRESETS, *FLOATS))


@pytest.mark.parametrize("name", ["minmax", "tree_sum"])
def test_reductions_have_no_plan(name):
    assert callable(getattr(kernels, name))
    with pytest.raises(dt.UnsupportedError, match="expected one of"):
        problem(name)


def test_native_alone_raises_where_there_is_no_kernel():
    with dt.use_kernels("native"), pytest.raises(dt.UnsupportedError, match="use_kernels"):
        problem("quantize", dt.QuantSpec("int8", rounding="stochastic(1)"))


def test_kernels_of_another_name():
    with pytest.raises(dt.SpecError, match="did you mean 'native'"), dt.use_kernels("natve"):
        pass


@pytest.mark.usefixtures("threads")
def test_number_of_threads():
    dt.set_num_threads(3)
    assert dt.get_num_threads() == dt.capabilities().threads == 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_bad_number_of_threads(bad):
    before = dt.get_num_threads()
    with pytest.raises(dt.DetentError, match=r"in 1\.\.1024, got"):
        dt.set_num_threads(bad)
    assert dt.get_num_threads() == before


@pytest.mark.parametrize("name", ["transpose", "", None])
def test_unknown_operation(name):
    with pytest.raises(dt.UnsupportedError, match="expected one of"):
        problem(name)
