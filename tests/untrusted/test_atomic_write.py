"""Atomic writes: a file is complete or absent; after a failure the old file stays, without temporary files."""

import errno
import os
import stat

import numpy as np
import pytest

import detent as dt
from detent import storage

Q = dt.quantize(np.linspace(-1, 1, 9, dtype=np.float32), dt.QuantParams("int4", 0.2))
FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(error):
    def raises(*_args, **_kwargs):
        raise error

    return raises


@pytest.fixture(params=["old content", None], ids=["a file before", "no file before"])
def target(request, tmp_path):
    path = tmp_path / "q.safetensors"
    if request.param is not None:
        path.write_text(request.param)
    return path


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["disk full", "interrupted"])
@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen"])
def test_a_failure_leaves_what_was_there(call, error, target, monkeypatch):
    before = {path.name: path.read_bytes() for path in target.parent.iterdir()}
    monkeypatch.setattr(os, call, fail(error))
    with pytest.raises(type(error)):
        Q.save(target)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in target.parent.iterdir()} == before


def test_a_missing_directory_stays_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Q.save(tmp_path / "nowhere" / "q.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_success_replaces_the_old_file_and_leaves_no_other(target):
    Q.save(target)
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert dt.QuantizedTensor.load(target) == Q


def test_data_is_on_disk_before_the_name_changes(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), rename(*paths))[1])
    storage.write_atomic(tmp_path / "a", b"x")
    assert calls[:2] == ["fsync", "replace"]


def test_a_directory_that_cannot_be_synced_is_not_a_failure(tmp_path, monkeypatch):
    """Some systems cannot sync a directory; the file itself is already in place."""
    sync = os.fsync

    def files_only(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    Q.save(tmp_path / "q")
    assert dt.QuantizedTensor.load(tmp_path / "q") == Q


@pytest.mark.skipif(os.name != "posix", reason="permission bits need POSIX")
@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_permissions_follow_the_mask(mask, expected, tmp_path):
    old = os.umask(mask)
    try:
        storage.write_atomic(tmp_path / "a", b"x")
        assert os.umask(mask) == mask
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == expected
