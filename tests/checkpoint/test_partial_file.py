"""Partial files survive SIGKILL: the job goes on, and ends with the same bytes."""

import signal
import subprocess
import sys

import pytest

import detent.checkpoint as qc
from detent.checkpoint.partial_file import PartialFile
from detent.checkpoint.row_items import ItemDone
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.errors import SpecError, WorkerError

from .tiny_checkpoints import write_checkpoint

JOB = """
import os, signal, sys
import detent.checkpoint as qc
from detent.checkpoint import partial_file

source, output, share, sync = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
partial_file.SECONDS_BETWEEN_SYNCS = sync

def progress(done, total):
    if done >= share * total:
        os.kill(os.getpid(), signal.SIGKILL)

qc.quantize(source, output, vocabulary=False, memory_budget=2_600_000, progress=progress)
"""


@pytest.mark.parametrize("sync", [0, 60], ids=["journal up to date", "journal behind"])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_a_killed_job_goes_on_and_ends_with_the_same_bytes(tmp_path, share, sync):
    source = write_checkpoint(tmp_path / "tiny")
    qc.quantize(source, tmp_path / "whole.gguf", vocabulary=False)
    command = [sys.executable, "-c", JOB, source, tmp_path / "x.gguf", str(share), str(sync)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "x.gguf").exists()
    report = qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)
    assert (report.resumed_nbytes > 0) == (sync == 0)
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


LAYOUT = gguf_layout([], [("a", (4, 8), "F32"), ("b", (8,), "F32")])


def test_a_file_that_lacks_rows_is_not_finished(tmp_path):
    with PartialFile(tmp_path / "x.gguf", LAYOUT, {}) as partial:
        partial.record(ItemDone(0, 0, 3, 0))
        partial.record(ItemDone(1, 0, 1, 0))
        with pytest.raises(WorkerError, match="lacks rows of tensor a"):
            partial.finish()
        partial.record(ItemDone(0, 3, 4, 0))
        partial.finish()
    data = (tmp_path / "x.gguf").read_bytes()
    assert data == LAYOUT.header + bytes(LAYOUT.nbytes - len(LAYOUT.header))


def test_the_space_is_reserved_at_the_start(tmp_path):
    layout = gguf_layout([], [("a", (1 << 10, 1 << 10), "F32")])
    with PartialFile(tmp_path / "x.gguf", layout, {}) as partial:
        status = partial.path.stat()
        assert status.st_size == layout.nbytes
        assert status.st_blocks * 512 >= layout.nbytes


def test_the_lock_is_released_when_the_job_ends(tmp_path):
    with PartialFile(tmp_path / "x.gguf", LAYOUT, {}), pytest.raises(SpecError, match="another job"):
        PartialFile(tmp_path / "x.gguf", LAYOUT, {})
    PartialFile(tmp_path / "x.gguf", LAYOUT, {}).__exit__(None, None, None)
