"""Untrusted NumPy files: damaged ones are rejected by their headers, before anything is allocated."""

import io
import os
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

import detent as dt
from detent.onnx_model.array_data import ArrayFile

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def npy(descr="<f4", order=False, shape=(2, 3), body=None, version=1, header=None):
    """Return the bytes of an .npy file with that header, right or wrong."""
    text = header if header is not None else repr({"descr": descr, "fortran_order": order, "shape": shape}).encode()
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + (X.tobytes() if body is None else body)


def npz(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n",
        b"{'shape': (2,3),'fortran_order':False,\"descr\" : '<f4'}",
    ],
)
def test_headers_of_other_writers(tmp_path, version, header):
    (tmp_path / "a.npy").write_bytes(npy(header=header, version=version))
    assert np.array_equal(ArrayFile(tmp_path / "a.npy").read()[""], X)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i2", ">u2", "<i4", ">i8", "<u8", "<f2", ">f4", "<f8"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 0, 3), (1, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("order", "CF")
def test_arrays_of_numpy_are_read_unchanged(tmp_path, dtype, shape, order):
    given = np.asarray((np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype), order=order)
    np.savez_compressed(tmp_path / "a.npz", a=given)
    array = ArrayFile(tmp_path / "a.npz").read()["a"]
    assert np.array_equal(array, given)
    assert array.dtype == given.dtype.newbyteorder("=")


HOSTILE = {
    "empty": b"",
    "text": b"hello, this is not an array",
    "magic only": b"\x93NUMPY",
    "version 9": npy(version=1).replace(b"NUMPY\x01", b"NUMPY\x09"),
    "header beyond the end": npy()[:30],
    "header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
    "truncated": npy()[:-1],
    "too long": npy() + b"x",
    "2^60 elements": npy(shape=(1 << 30, 1 << 30)),
    "a size of 900 digits": npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 900 + b",)}"),
    "a size of 9000 digits": npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 9000 + b",)}"),
    "overflow to zero": npy(shape=(1 << 32, 1 << 32, 0), body=b"x"),
    "negative size": npy(shape=(-2, -3)),
    "rank of 100": npy(shape=(1,) * 100, body=bytes(4)),
    "objects": npy(descr="|O"),
    "code": npy(header=b"{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (2, 3)}"),
    "nested brackets": npy(header=b"(" * 9000),
    "void": npy(descr="|V4"),
    "float128": npy(descr="<f16"),
    "float of one byte": npy(descr="<f1"),
    "no order": npy(header=b"{'descr': '<f4', 'shape': (2, 3)}"),
}


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_headers(tmp_path, name, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(HOSTILE[name]) if kind == "npy" else npz(path, [("x.npy", HOSTILE[name])])
    refused(path)


def refused(path, word=""):
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(dt.FileFormatError) as caught:
        ArrayFile(path).read()
    elapsed, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert word in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert peak < 1 << 24
    assert elapsed < 1


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("x.npy", npy()), ("y.txt", b"")], "is not an .npy array"),
        ([("x", npy())], "is not an .npy array"),
        ([("directory/", b"")], "is not an .npy array"),
        ([("x" * 5000, npy())], "is not an .npy array"),
    ],
    ids=["a text", "no suffix", "a directory", "a long name"],
)
def test_members_that_are_not_arrays(tmp_path, members, word):
    refused(npz(tmp_path / "a.npz", members), word)


def test_two_members_with_the_same_name(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        npz(tmp_path / "a.npz", [("x.npy", npy()), ("x.npy", npy())])
    refused(tmp_path / "a.npz", "the same name")


def test_a_zip_bomb(tmp_path):
    """Zeros compress about a thousandfold; the size is checked before they are unpacked."""
    body = bytes(1 << 26)
    path = npz(tmp_path / "a.npz", [("x.npy", npy("|u1", shape=(len(body),), body=body))], compression=8)
    assert path.stat().st_size < 1 << 17
    refused(path, "when unpacked, more than")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_unsupported_compressions(tmp_path, method):
    refused(npz(tmp_path / "a.npz", [("x.npy", npy())], compression=method), "NumPy cannot unpack it")


def test_an_encrypted_member(tmp_path):
    path = npz(tmp_path / "a.npz", [("x.npy", npy())])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    data[6] |= 1
    path.write_bytes(data)
    refused(path, "encrypted")


def test_members_that_claim_more_than_the_file(tmp_path):
    path = npz(tmp_path / "a.npz", [("x.npy", npy())])
    size, claim = len(npy()).to_bytes(4, "little"), (1 << 31).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, claim))
    refused(path, "fewer than its zip directory claims")


def test_damaged_contents_are_rejected_when_they_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(1000.0))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[5000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    file = ArrayFile(tmp_path / "a.npz")
    with pytest.raises(dt.FileFormatError, match="CRC"):
        file.read()
    with pytest.raises(dt.FileFormatError, match="CRC"):
        list(file.slices(10))


def test_a_file_that_changes_between_passes_is_rejected(tmp_path):
    np.savez(tmp_path / "a.npz", x=X)
    file = ArrayFile(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=X[:1])
    with pytest.raises(dt.FileFormatError, match="changed"):
        list(file.slices(1))


def test_truncated_and_flipped_anywhere(tmp_path):
    rng = np.random.default_rng(5)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=X, y=np.arange(100))
    data, path, survivors = buffer.getvalue(), tmp_path / "a.npz", 0
    for i in range(400):
        if i % 2:
            bad = data[: int(rng.integers(len(data)))]
        else:
            copy = bytearray(data)
            copy[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            bad = bytes(copy)
        path.write_bytes(bad)
        try:
            ArrayFile(path).read()
        except dt.FileFormatError:
            continue
        survivors += 1
    assert survivors < 100


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX's")
def test_a_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    refused(tmp_path / "a.npy", "no such file")


def test_memory_does_not_grow_with_the_samples(tmp_path):
    peaks = []
    for count in (16, 256):
        np.savez(tmp_path / "a.npz", x=np.ones((count, 1 << 14), np.float32))
        file = ArrayFile(tmp_path / "a.npz")
        tracemalloc.start()
        assert sum(float(part["x"].sum()) for part in file.slices(4)) == count << 14
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1
