"""Labels from files."""

import numpy as np
import pytest

from detent.errors import FileFormatError, SpecError
from detent.evaluate import label_files, read_labels


def test_all_formats(tmp_path):
    labels = np.array([3, 0, 7])
    np.save(tmp_path / "a.npy", labels)
    np.savez(tmp_path / "a.npz", labels)
    np.savez(tmp_path / "b.npz", x=labels + 1, labels=labels)
    (tmp_path / "a.txt").write_text("3\n0\n7\n\n")
    (tmp_path / "a.csv").write_text("\ufeffclass\r\n3\r\n0\r\n7\r\n", encoding="utf-8")
    for path in sorted(tmp_path.iterdir()):
        assert read_labels(path).tolist() == [3, 0, 7], path
        assert read_labels(path).dtype.kind == "i"
    (tmp_path / "b.txt").write_text("0.5\n1\n")
    assert read_labels(tmp_path / "b.txt").tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.txt", "1\ncat\n", FileFormatError, "expected one number per line, got 'cat' as label 1"),
        ("a.txt", "class\n1\n", FileFormatError, "got 'class' as label 0"),
        ("a.csv", "a,b\n1,2\n", FileFormatError, "got '1,2' as label 0"),
        ("a.txt", "1\n\n2\n", FileFormatError, "got '' as label 1"),
        ("a.txt", "1" * 400, FileFormatError, "too large"),
        ("a.json", "[1]", SpecError, "expected labels in an .npy, .npz, .txt or .csv file"),
        ("a.npy", "[1]", FileFormatError, "does not begin like an .npy file"),
    ],
)
def test_bad_files(name, text, error, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        read_labels(tmp_path / name)


def test_other_bad_files(tmp_path, monkeypatch):
    for name in ("a.txt", "a.npy"):
        with pytest.raises(FileFormatError, match="there is no such file"):
            read_labels(tmp_path / name)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe1")
    with pytest.raises(FileFormatError, match="is not text"):
        read_labels(tmp_path / "b.txt")
    np.savez(tmp_path / "a.npz", x=[1], y=[2])
    with pytest.raises(SpecError, match="has the arrays x, y: expected one array"):
        read_labels(tmp_path / "a.npz")
    (tmp_path / "c.txt").write_text("1\n2\n")
    monkeypatch.setattr(label_files, "MAX_TEXT_BYTES", 3)
    with pytest.raises(FileFormatError, match="is larger than 3 B"):
        read_labels(tmp_path / "c.txt")
