"""The digits in the package equal those of the source; training and test images do not overlap."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

import detent as dt
from detent.demo import network
from detent.demo.network import Pictures, read_digits

# Hash of the 1797 x 65 numbers in the source's file, as bytes, row by row.
SOURCE = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"


def stored():
    file = Path(network.__file__).parent / network.FILE
    with np.load(file, allow_pickle=False) as archive:
        return archive["images"], archive["labels"], archive["test"]


def test_numbers_are_those_of_the_source():
    images, labels, _ = stored()
    table = np.concatenate([images.reshape(1797, 64), labels[:, None]], axis=1)
    assert (table.dtype, table.shape) == (np.uint8, (1797, 65))
    assert hashlib.sha256(table.tobytes()).hexdigest() == SOURCE


def test_parts_are_a_partition_with_fifty_of_each_class_to_test_on():
    train, test = read_digits()
    images, labels, chosen = stored()
    assert (len(train), len(test)) == (1297, 500)
    assert np.bincount(test.labels).tolist() == [50] * 10
    assert np.array_equal(train.labels, labels[~chosen])
    assert np.array_equal(test.images[:, 0] * 16, images[chosen])
    assert (train.images.dtype, train.images.min(), train.images.max()) == (np.float32, 0.0, 1.0)


def test_no_test_image_is_among_those_to_train_on():
    train, test = ({image.tobytes() for image in part.images} for part in read_digits())
    assert not train & test


def test_source_and_licence_are_beside_the_data():
    text = (Path(network.__file__).parent / "digits" / "README.md").read_text(encoding="utf-8")
    for word in ("Alpaydin", "Kaynak", "CC BY 4.0", "**Changes.**", "scikit-learn"):
        assert word in text


def test_a_damaged_file_is_named(monkeypatch):
    monkeypatch.setattr(network, "FILE", "digits/README.md")
    with pytest.raises(dt.FileFormatError, match=r"cannot read detent/demo/digits/README.md .*: reinstall detent"):
        read_digits()


def test_images_without_labels_are_rejected():
    with pytest.raises(dt.ShapeError, match=r"got images of shape .* for 3 labels"):
        Pictures(np.zeros((2, 1, 8, 8), np.float32), np.zeros(3, np.int64))
