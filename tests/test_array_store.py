"""Arrays have the same bits in memory and in the temporary file, which is closed at the end."""

import gc
from concurrent.futures import ThreadPoolExecutor, wait

import ml_dtypes
import numpy as np
import pytest

from detent import array_store
from detent.array_store import ArrayStore, concatenate, copies

ARRAYS = [
    np.float32([[1, np.nan], [-0.0, np.inf]]),
    np.array(7, np.int64),
    np.zeros((0, 3), np.float64),
    np.array([True, False]),
    np.arange(12, dtype=np.float16).reshape(3, 4).T,
    np.arange(5).astype(ml_dtypes.bfloat16),
]


def same(first, second):
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


@pytest.mark.parametrize("budget", [None, 0, 60, 10_000])
@pytest.mark.parametrize("read", [ArrayStore.__getitem__, ArrayStore.mapped])
def test_arrays_come_back(budget, read):
    store = ArrayStore(budget)
    for number, array in enumerate(ARRAYS):
        store[number] = [array, array[..., :1] if array.ndim else array]
    assert all(number in store for number in range(len(ARRAYS)))
    for number, array in reversed([*enumerate(ARRAYS)]):
        first, second = read(store, number)
        assert same(first, array)
        assert same(second, array[..., :1] if array.ndim else array)
    assert bool(store.nbytes_in_file) == (budget in {0, 60})


def test_empty_arrays_at_the_end_of_the_file_are_mapped():
    store, arrays = ArrayStore(0), [np.zeros(3), np.zeros((0, 3))]
    store["a"] = arrays
    assert all(map(same, store.mapped("a"), arrays))


@pytest.mark.parametrize("budget", [None, 0, 3000])
@pytest.mark.parametrize("read", [ArrayStore.__getitem__, ArrayStore.mapped])
def test_one_thread_reads_while_another_replaces(budget, read, monkeypatch):
    """Without a lock for the lookup, a thread finds no arrays between the removal of the old and the new ones."""
    store, lookups, drop = ArrayStore(budget), [], ArrayStore._drop

    def drop_while_another_thread_reads(store, key):
        drop(store, key)
        lookups.append(pool.submit(read, store, key))
        wait(lookups, timeout=0.05)

    store["a"] = [np.full(256, 1), np.full(3, 1)]
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(ArrayStore, "_drop", drop_while_another_thread_reads)
        store["a"] = [np.full(256, 2), np.full(3, 2)]
        assert [int(each[-1]) for each in lookups[0].result(timeout=10)] == [2, 2]


def test_arrays_within_the_budget_stay_in_memory():
    store, array = ArrayStore(16), np.float32([1, 2])
    for key in "abc":
        store[key] = [array]
    assert [store[key][0] is array for key in "abc"] == [True, True, False]
    assert store.nbytes_in_file == array.nbytes


def test_texts_stay_in_memory():
    store, texts = ArrayStore(0), np.array(["a", "b"], object)
    store["a"] = [texts]
    assert store["a"][0] is texts
    assert concatenate([texts, texts], 0).tolist() == ["a", "b"] * 2


def test_deleted_arrays_are_overwritten():
    store = ArrayStore(0)
    for number in range(100):
        store[number] = [np.full(64, number), np.full(3, number)]
        if number >= 4:
            del store[number - 4]
    assert [int(store[number][1][2]) for number in range(96, 100)] == [96, 97, 98, 99]
    assert 0 not in store
    assert store.nbytes_in_file < 6 * (64 + 8) * 8


@pytest.mark.parametrize("budget", [0, 64])
def test_arrays_are_replaced(budget):
    store = ArrayStore(budget)
    for number in range(5):
        store["a"] = [np.full(8, number)]
    assert int(store["a"][0][7]) == 4
    assert store.nbytes_in_file == (0 if budget else 64)


def test_mapped_arrays_outlive_the_store_and_its_file(monkeypatch):
    files, make = [], array_store.tempfile.TemporaryFile
    monkeypatch.setattr(
        array_store.tempfile, "TemporaryFile", lambda **options: files.append(make(**options)) or files[-1]
    )
    store = ArrayStore(0)
    store["a"] = [np.arange(1000), np.float32([3])]
    first, second = store.mapped("a")
    del store
    gc.collect()
    assert [file.closed for file in files] == [True]
    assert int(first.sum()) == 499_500
    assert second.tolist() == [3]
    assert not first.flags.writeable


PARTS = [np.full((n, 2), n, np.float32) for n in (1, 0, 3, 2)]


@pytest.mark.parametrize("budget", [None, 0, 10, 1000])
def test_concatenate(budget):
    result = concatenate(iter(PARTS), budget)
    assert same(result, np.concatenate(PARTS))
    result[:] = 0
    assert float(PARTS[0].max()) == 1
    assert same(concatenate([np.float32([1]), np.float64([2])], budget), np.array([1.0, 2.0]))


@pytest.mark.parametrize("budget", [None, 0, 10, 1000])
def test_copies(budget):
    parts = [*PARTS, np.float32([4])]
    results = copies(iter(parts), budget)
    assert all(map(same, results, parts))
    for each in results:
        each[:] = 0
    assert float(parts[0].max()) == 1


def test_few_files_are_open(monkeypatch):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        store = ArrayStore(0)
        for number in range(1000):
            store[number] = [np.full(8, number)]
        arrays = [store[number] for number in range(1000)]
        parts = copies((array for (array,) in arrays), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(each[0]) for each in parts] == [*range(1000)]
