"""Temporary files of killed writers are removed by the next write to the same path; those of running writers stay."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from detent import storage

fcntl = pytest.importorskip("fcntl", reason="file locks need POSIX")

# Writes one part, prints a line, and continues after it reads a line.
WRITER = """
import sys
from detent import storage

def parts():
    yield b"half "
    print("ready", flush=True)
    sys.stdin.readline()
    yield b"whole"

storage.write_atomic(sys.argv[1], parts())
print("done", flush=True)
"""
DAY = 24 * 60 * 60
FOREIGN = "0000" if storage._system() != "0000" else "1111"


@contextmanager
def writer(target):
    """A process in the middle of writing the target."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", ["a.onnx", "with space [x]+.json", "a.onnx.0123456789ab.data"])
def test_the_next_write_removes_what_a_killed_writer_left(name, tmp_path):
    target = tmp_path / name
    with writer(target) as one, writer(target) as other:
        for process in (one, other):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    left = names(tmp_path)
    assert len(left) == 2
    assert all(each.startswith(f".{name}.") for each in left)
    storage.write_atomic(target, b"new")
    assert names(tmp_path) == [name]
    assert target.read_bytes() == b"new"


def test_a_model_removes_what_its_external_data_left(tmp_path):
    with writer(tmp_path / "a.onnx.0123456789ab.data") as process:
        process.kill()
        process.wait()
    storage.write_atomic(tmp_path / "a.onnx", b"new")
    assert names(tmp_path) == ["a.onnx"]


def test_a_living_writer_keeps_its_file(tmp_path):
    target = tmp_path / "a"
    with writer(target) as process:
        (temporary,) = names(tmp_path)
        for content in (b"first", b"second"):
            storage.write_atomic(target, content)
            assert names(tmp_path) == [temporary, "a"]
            assert target.read_bytes() == content
        assert process.communicate("\n")[0] == "done\n"
    assert names(tmp_path) == ["a"]
    assert target.read_bytes() == b"half whole"


def test_leftovers_of_other_names_stay(tmp_path):
    with writer(tmp_path / "a.b") as process:
        process.kill()
        process.wait()
    left = names(tmp_path)
    for name in ("a", "b", ".a.b", "a.b.c"):
        storage.write_atomic(tmp_path / name, b"new")
    assert set(left) < set(names(tmp_path))


@pytest.mark.parametrize(("age", "stays"), [(0, True), (DAY - 60, True), (DAY + 60, False)])
def test_files_of_other_systems_go_after_a_day(age, stays, tmp_path):
    """On network file systems, a lock may be invisible to other machines."""
    temporary = tmp_path / f".a.{FOREIGN}0123456789ab"
    temporary.write_bytes(b"half")
    then = time.time() - age
    os.utime(temporary, (then, then))
    storage.write_atomic(tmp_path / "a", b"new")
    assert temporary.exists() is stays


def test_old_files_of_other_systems_stay_while_locked(tmp_path):
    temporary = tmp_path / f".a.{FOREIGN}0123456789ab"
    temporary.write_bytes(b"half")
    os.utime(temporary, (0, 0))
    with temporary.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        storage.write_atomic(tmp_path / "a", b"new")
        assert temporary.exists()
    storage.write_atomic(tmp_path / "a", b"new")
    assert not temporary.exists()


def test_only_ordinary_files_are_removed(tmp_path):
    other = tmp_path / "precious"
    other.write_bytes(b"data")
    link, directory, pipe, similar = (
        tmp_path / f".a.{storage._system()}{'0123456789ab'[:-1]}{end}" for end in ("0", "1", "2", "g")
    )
    link.symlink_to(other)
    directory.mkdir()
    os.mkfifo(pipe)
    similar.write_bytes(b"not hex digits")
    storage.write_atomic(tmp_path / "a", b"new")
    assert {link.name, directory.name, pipe.name, similar.name, "precious", "a"} == set(names(tmp_path))
    assert other.read_bytes() == b"data"


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, []

    def flock(handle, operation):
        if operation == fcntl.LOCK_EX and len(taken) < 2:
            (temporary,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
            taken.append(temporary.name)
            storage._remove_unlocked(temporary)
            assert not temporary.exists()
        return lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    storage.write_atomic(tmp_path / "a", b"new")
    assert len(taken) == 2
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("error", [OSError(95, "Operation not supported"), OSError(37, "No locks available")])
def test_file_systems_without_locks_keep_leftovers(error, tmp_path, monkeypatch):
    def flock(_handle, _operation):
        raise error

    temporary = tmp_path / f".a.{storage._system()}0123456789ab"
    temporary.write_bytes(b"half")
    monkeypatch.setattr(fcntl, "flock", flock)
    storage.write_atomic(tmp_path / "a", b"new")
    assert names(tmp_path) == [temporary.name, "a"]


def test_systems_without_locks_write_as_before(tmp_path, monkeypatch):
    temporary = tmp_path / f".a.{storage._system()}0123456789ab"
    temporary.write_bytes(b"half")
    monkeypatch.setattr(storage, "fcntl", None)
    storage.write_atomic(tmp_path / "a", b"new")
    assert names(tmp_path) == [temporary.name, "a"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_many_writers_of_one_name_do_not_disturb_each_other(tmp_path):
    target, script = (
        tmp_path / "a",
        (
            "import sys; from detent import storage\n"
            "for _ in range(40): storage.write_atomic(sys.argv[1], sys.argv[2].encode() * 1000)"
        ),
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(target), text]) for text in "abc"]
    assert [process.wait(timeout=120) for process in writers] == [0, 0, 0]
    assert names(tmp_path) == ["a"]
    assert target.read_text() in {text * 1000 for text in "abc"}
