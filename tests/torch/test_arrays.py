"""Tensors as arrays: memory order, scratch memory, fingerprints, and batches as arguments."""

import numpy as np
import pytest
import torch

import detent as dt
from detent.torch.arrays import arguments_of, borrow, fingerprint, order_of, to_array, to_tensor


def test_channels_last_keeps_its_order_and_names_its_axis():
    x = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    order = order_of(x, dt.QuantSpec("int8", granularity=dt.PerAxis(1)))
    assert order.axes == (0, 2, 3, 1)
    assert order.spec.granularity == dt.PerAxis(3)
    assert order.lay(x).data_ptr() == x.data_ptr()
    assert torch.equal(order.restore(order.lay(x)), x)


def test_scratch_memory_is_shared_by_slot():
    first, second = borrow("input", torch.zeros(1 << 18)), borrow("input", torch.zeros(1 << 17))
    assert first.data_ptr() == second.data_ptr()
    assert borrow(None, second).data_ptr() != second.data_ptr()


@pytest.mark.parametrize("size", [2, 1000])
def test_a_fingerprint_changes_with_writes_that_no_counter_sees(size):
    x = torch.zeros(size)
    before = fingerprint(x)
    x.data[0] = 1.0
    assert fingerprint(x) != before


def test_bfloat16_shares_memory_both_ways():
    x = torch.ones(2, dtype=torch.bfloat16)
    assert to_array(x).dtype == np.dtype("bfloat16")
    back = to_tensor(to_array(x))
    back[0] = 3.0
    assert x[0] == 3.0


def test_batches_become_arguments():
    assert arguments_of({"mask": None}).kwargs == {"mask": None}
    assert arguments_of([1, 2]).args == (1, 2)
    with pytest.raises(dt.DtypeError, match="got int for a batch"):
        arguments_of(3)
