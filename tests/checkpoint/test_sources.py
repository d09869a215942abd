import shutil

import numpy as np
import pytest

import detent.checkpoint as qc
from detent.errors import DtypeError, FileFormatError

from .tiny_checkpoints import llama_tensors, write_checkpoint


def test_directories_files_and_gguf_files_open(tmp_path):
    directory = write_checkpoint(tmp_path / "m", shards=1)
    qc.quantize(directory, tmp_path / "x.gguf", "gguf:BF16", vocabulary=False)
    expected = llama_tensors()["lm_head.weight"].astype(np.float32)
    for path in (directory, directory / "model-00001-of-00001.safetensors"):
        assert np.array_equal(qc.open(path)["lm_head.weight"].dequantize(), expected)
    assert np.array_equal(qc.open(tmp_path / "x.gguf")["output.weight"].dequantize(), expected)
    (tmp_path / "only").mkdir()
    shutil.copy(tmp_path / "x.gguf", tmp_path / "only")
    assert "output.weight" in qc.open(tmp_path / "only")


def test_other_paths_raise(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"12345678")
    with pytest.raises(FileFormatError, match="is not a checkpoint"):
        qc.open(tmp_path / "x.bin")
    with pytest.raises(DtypeError, match="expected the path of a checkpoint"):
        qc.open(3)
    with pytest.raises(FileFormatError, match="no such file"):
        qc.open(tmp_path / "missing")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FileFormatError, match="2 GGUF models"):
        qc.open(tmp_path)
