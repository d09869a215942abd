"""Images as data: pixels, layouts, labels, and every kind of bad file."""

import io
import re
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

import detent as dt
from detent.onnx_model import DataFiles, Preprocessing
from detent.onnx_model.batches import open_batches
from detent.onnx_model.image_data import MAX_PIXELS, complete
from detent.onnx_model.model_inputs import InputInfo

F32 = np.dtype("float32")
NCHW = InputInfo("x", F32, (None, 3, 8, 12))
NHWC = InputInfo("x", F32, (None, 8, 12, 3))
BYTES = InputInfo("x", np.dtype("uint8"), (None, 3, 8, 12))
GRAY = InputInfo("x", F32, (None, 1, 8, 12))


def pixels(height=8, width=12, channels=3, seed=0):
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(path, array, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


def read(path, info=NCHW, preprocess=None, **options):
    return [feed[info.name] for feed in open_batches(DataFiles(path, preprocess=preprocess, **options), [info])]


def refusal(path, error, *words, info=NCHW, **options):
    with pytest.raises(error) as caught:
        read(path, info, **options)
    assert isinstance(caught.value, dt.DetentError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


# Pixels


@pytest.mark.parametrize("suffix", ["png", "bmp", "webp", "PNG"])
def test_pixels_of_lossless_formats(tmp_path, suffix):
    array = pixels()
    write(tmp_path / f"a.{suffix}", array, **({"lossless": True} if suffix == "webp" else {}))
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    assert batch.dtype == F32
    assert np.array_equal(batch, array.transpose(2, 0, 1)[None])
    assert np.array_equal(read(tmp_path, preprocess="0..255,resize=8")[0], batch)  # a crop of the whole image


def test_jpeg_is_close(tmp_path):
    array = np.full((8, 12, 3), (200, 100, 50), np.uint8)
    write(tmp_path / "a.jpeg", array)
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    assert np.abs(batch - array.transpose(2, 0, 1)).max() <= 3


@pytest.mark.parametrize(
    ("text", "scale", "mean", "std"),
    [
        ("imagenet", 1 / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ("-1..1", 1 / 255, 0.5, 0.5),
        ("0..1", 1 / 255, 0, 1),
        ("scale=2,mean=1,2,3", 2, [1, 2, 3], 1),
    ],
)
def test_normalization(tmp_path, text, scale, mean, std):
    array = pixels()
    write(tmp_path / "a.png", array)
    (batch,) = read(tmp_path, preprocess=f"{text},crop=none")
    expected = ((array.astype(float) * scale - np.asarray(mean)) / np.asarray(std)).astype(F32).transpose(2, 0, 1)
    assert np.array_equal(batch[0], expected)


def test_layouts_and_colors(tmp_path):
    array = pixels()
    write(tmp_path / "a.png", array)
    assert np.array_equal(read(tmp_path, NHWC, "0..255,crop=none")[0][0], array)
    assert np.array_equal(read(tmp_path, BYTES, "crop=none")[0][0], array.transpose(2, 0, 1))
    assert read(tmp_path, BYTES, "crop=none")[0].dtype == np.uint8
    bgr = read(tmp_path, NHWC, "mean=1,2,3,scale=1,color=bgr,crop=none")[0][0]
    assert np.array_equal(bgr, array[:, :, ::-1] - np.float32([1, 2, 3]))
    gray = read(tmp_path, GRAY, "0..255,crop=none")[0][0, 0]
    assert np.array_equal(gray, np.asarray(Image.fromarray(array).convert("L")))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_modes_become_rgb(tmp_path, mode):
    path = write(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), pixels(), mode)
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(batch[0], expected.transpose(2, 0, 1))


def test_transparent_pixels_are_white(tmp_path):
    array = pixels(channels=4)
    array[..., 3] = 0
    array[0, 0] = 10, 20, 30, 255
    write(tmp_path / "a.png", array)
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    assert batch[0, :, 0, 0].tolist() == [10, 20, 30]
    assert (batch[0, :, 1:] == 255).all()


def test_16_bits_keep_their_upper_half(tmp_path):
    array = np.arange(96, dtype=np.uint16).reshape(8, 12) * 600
    Image.fromarray(array).save(tmp_path / "a.png")
    (batch,) = read(tmp_path, GRAY, "0..255,crop=none")
    assert np.array_equal(batch[0, 0], array >> 8)


def test_exif_orientation(tmp_path):
    array = np.repeat(np.repeat(pixels(3, 2), 4, 0), 4, 1)  # 12 x 8, of the shape (width, height)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown rotated by 90 degrees clockwise
    write(tmp_path / "a.png", array, exif=exif)
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    assert np.array_equal(batch[0], np.rot90(array, -1).transpose(2, 0, 1))


def test_damaged_exif_is_ignored(tmp_path):
    array = pixels()
    write(tmp_path / "a.png", array, exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01")
    (batch,) = read(tmp_path, preprocess="0..255,crop=none")
    assert np.array_equal(batch[0], array.transpose(2, 0, 1))


def test_center_crop(tmp_path):
    array = np.zeros((32, 64, 3), np.uint8)
    array[:, 16:48] = 255  # the middle half
    write(tmp_path / "a.png", array)
    square = InputInfo("x", F32, (None, 3, 16, 16))
    (batch,) = read(tmp_path, square, "0..1,resize=16")
    assert (batch.round() == 1).all()
    (batch,) = read(tmp_path, square, "0..1,crop=none")
    assert batch[0, 0, 0].round().tolist() == [0] * 4 + [1] * 8 + [0] * 4
    (small,) = read(
        tmp_path, InputInfo("x", F32, (None, 3, 64, 16)), "0..1,resize=4"
    )  # too small for the crop: covers it
    assert small.shape == (1, 3, 64, 16)


# Size, layout and normalization from the model


@pytest.mark.parametrize(
    ("dtype", "shape", "text", "expected"),
    [
        ("float32", (1, 3, 224, 224), "", "imagenet,size=224x224,resize=256,crop=center,layout=nchw,color=rgb"),
        ("float32", (None, 299, 299, 3), "-1..1", "-1..1,size=299x299,resize=342,crop=center,layout=nhwc,color=rgb"),
        ("float32", (None, 1, 28, 28), "", "0..1,size=28x28,resize=32,crop=center,layout=nchw,color=gray"),
        ("uint8", (None, 64, 32, 3), "crop=none", "0..255,size=64x32,crop=none,layout=nhwc,color=rgb"),
        (
            "float32",
            (None, None, None, None),
            "size=8x8",
            "imagenet,size=8x8,resize=10,crop=center,layout=nchw,color=rgb",
        ),
        ("float32", None, "size=8x8,layout=nhwc", "imagenet,size=8x8,resize=10,crop=center,layout=nhwc,color=rgb"),
        ("float32", (1, 3, 8, 3), "", "imagenet,size=8x3,resize=4,crop=center,layout=nchw,color=rgb"),
    ],
)
def test_fields_that_follow_from_the_model(dtype, shape, text, expected):
    info = InputInfo("x", np.dtype(dtype), shape)
    assert str(complete(Preprocessing.parse(text), info, "photos")) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "text", "error", "words"),
    [
        ("float32", (None, 8, 16, 16), "", dt.ShapeError, ["(any, 8, 16, 16)", "8 channels", "3"]),
        ("float32", (None, 4, 16, 16), "color=gray", dt.ShapeError, ["4 channels", "gray"]),
        ("float32", (None, 3, 16, 16), "layout=nhwc", dt.ShapeError, ["NHWC", "16 channels"]),
        ("float32", (None, 3, None, None), "", dt.SpecError, ["--preprocess size=224x224"]),
        ("float32", (None, 3, 16, 16), "size=8x8", dt.ShapeError, ["size=8x8", "drop size"]),
        ("float32", (None, 3), "", dt.ShapeError, ["4 axes"]),
        ("bool", (None, 3, 8, 8), "", dt.ShapeError, ["bool"]),
        ("uint8", (None, 3, 8, 8), "imagenet", dt.SpecError, ["uint8", "0..255"]),
        ("uint8", (None, 3, 8, 8), "scale=2", dt.SpecError, ["uint8"]),
        ("int8", (None, 3, 8, 8), "", dt.SpecError, ["int8", "cannot hold pixels"]),
        ("float32", (None, 1, 8, 8), "imagenet", dt.SpecError, ["3 numbers", "gray"]),
    ],
)
def test_models_that_do_not_fit(dtype, shape, text, error, words):
    with pytest.raises(error) as caught:
        complete(Preprocessing.parse(text), InputInfo("x", np.dtype(dtype), shape), "photos")
    assert not [word for word in ("photos", *words) if word not in str(caught.value)], str(caught.value)


def test_the_guess_is_noted(tmp_path, caplog):
    write(tmp_path / "a.png", pixels())
    with caplog.at_level("INFO", "detent"):
        batches = open_batches(tmp_path, [NCHW])
    note = "images: 1 file, 8x12 cropped from 10, RGB, NCHW, ImageNet mean and std (guessed; --preprocess changes it)"
    assert batches.notes == (note,)
    assert batches.subset([0]).notes == (note,)
    assert caplog.messages == [note]
    assert open_batches(DataFiles(tmp_path, preprocess="0..1"), [NCHW]).notes == (
        "images: 1 file, 8x12 cropped from 10, RGB, NCHW, pixels scaled to 0..1",
    )
    (note,) = open_batches(DataFiles(tmp_path, preprocess="scale=1,std=2,4,8"), [NCHW]).notes
    assert note.endswith("scale=1.0 mean=0.0 std=2.0 4.0 8.0")


def test_the_model_may_normalize_pixels_itself(tmp_path):
    write(tmp_path / "a.png", pixels())
    info = InputInfo("x", F32, (None, 3, 8, 12), pixels="0..255")
    (note,) = open_batches(tmp_path, [info]).notes
    assert note.endswith("pixels 0..255 (guessed from the model's first operator; --preprocess changes it)")


def test_images_are_decoded_once(tmp_path, monkeypatch):
    write(tmp_path / "a.png", pixels())
    batches = open_batches(tmp_path, [NCHW])
    (first,) = batches
    (tmp_path / "a.png").unlink()
    (second,) = batches
    assert np.array_equal(first["x"], second["x"])
    first["x"][:] = 0  # a caller may change what it gets
    assert np.array_equal(next(iter(batches))["x"], second["x"])
    monkeypatch.setattr("detent.onnx_model.image_data.CACHE_BYTES", 0)
    write(tmp_path / "a.png", pixels())
    batches = open_batches(tmp_path, [NCHW])
    assert np.array_equal(next(iter(batches))["x"], second["x"])
    (tmp_path / "a.png").unlink()
    with pytest.raises(dt.FileFormatError, match=r"a\.png"):
        list(batches)


# Batches and labels


def write_classes(folder, counts, size=(8, 12)):
    for i, (name, count) in enumerate(counts.items()):
        for j in range(count):
            write(folder / name / f"{j}.png", np.full((*size, 3), 10 * i + j, np.uint8))
    return folder


def test_directories_are_classes(tmp_path):
    write_classes(tmp_path, {"dog": 3, "cat": 2, "a-b": 1, "ab/inner": 1})
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "x.png", pixels())
    (tmp_path / "notes.md").write_text("not data")
    batches = open_batches(DataFiles(tmp_path, batch_size=3, preprocess="0..255"), [NCHW])
    assert (batches.count, batches.classes) == (3, ("a-b", "ab", "cat", "dog"))
    assert batches.labels.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert batches.labels.dtype == np.int64
    assert [feed["x"][:, 0, 0, 0].tolist() for feed in batches] == [[20, 30, 10], [11, 0, 1], [2]]
    subset = batches.subset([1, 2])
    assert subset.labels.tolist() == [2, 3, 3, 3]
    assert subset.first(1).labels.tolist() == [2, 3, 3]
    other = InputInfo("x", F32, (None, None, 8, 12))
    assert open_batches(subset, [other]).labels.tolist() == [2, 3, 3, 3]
    assert open_batches(subset, [other]).notes == batches.notes


def test_an_empty_directory_is_a_class(tmp_path):
    write_classes(tmp_path, {"dog": 1, "ant": 1})
    (tmp_path / "cat").mkdir()
    (tmp_path / ".git").mkdir()
    batches = open_batches(DataFiles(tmp_path, preprocess="0..255"), [NCHW])
    assert (batches.classes, batches.labels.tolist()) == (("ant", "cat", "dog"), [0, 2])


def test_files_without_classes_have_no_labels(tmp_path):
    for name in ("b.png", "a.png", "c.png"):
        write(tmp_path / name, np.full((8, 12, 3), ord(name[0]), np.uint8))
    batches = open_batches(DataFiles(tmp_path, preprocess="0..255"), [NCHW])
    assert (batches.labels, batches.classes) == (None, ())
    assert [feed["x"][0, 0, 0, 0] for feed in batches] == [97, 98, 99]
    assert [feed["x"][0, 0, 0, 0] for feed in batches.subset([0, 2])] == [97, 99]
    assert read(tmp_path / "b.png", preprocess="0..255")[0][0, 0, 0, 0] == 98


def test_only_the_batches_of_a_subset_are_decoded(tmp_path):
    for i in range(4):
        path = write(tmp_path / f"{i}.png", pixels(seed=i))
    path.write_bytes(path.read_bytes()[:-60])
    batches = open_batches(tmp_path, [NCHW])
    assert len(list(batches.subset([0, 1, 2]))) == 3
    with pytest.raises(dt.FileFormatError, match=r"3\.png: the image is damaged or truncated"):
        list(batches)


def test_a_fixed_batch_size_leaves_out_the_rest(tmp_path):
    write_classes(tmp_path, {"a": 3, "b": 4})
    fixed = InputInfo("x", F32, (3, 3, 8, 12))
    batches = open_batches(tmp_path, [fixed])
    assert [feed["x"].shape[0] for feed in batches] == [3, 3]
    assert batches.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert "7 files" in batches.notes[0]
    assert batches.notes[0].endswith("; 1 of 7 left out, because the model's batch size is 3")
    refusal(
        tmp_path, dt.ShapeError, "got 7 images", "batch size is 9", "add 2", info=InputInfo("x", F32, (9, 3, 8, 12))
    )
    refusal(tmp_path, dt.ShapeError, "batch size of 2", "expects 3", info=fixed, batch_size=2)


def test_fingerprints_equal_those_of_the_arrays(tmp_path):
    write_classes(tmp_path / "photos", {"a": 2, "b": 2})
    arrays = read(tmp_path / "photos")
    np.savez(tmp_path / "d.npz", x=np.concatenate(arrays))
    prints = []
    for path in (tmp_path / "photos", tmp_path / "d.npz"):
        batches = open_batches(path, [NCHW])
        list(batches.hashed())
        prints.append(batches.fingerprint())
    assert prints[0] == prints[1]


# Bad input


def png(width, height, body=b""):
    """Return a PNG file with that header and any body."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 60_000], ids=["Pillow warns", "Pillow raises"])
def test_image_bombs_are_rejected_by_their_headers(tmp_path, side):
    assert side * side > MAX_PIXELS
    (tmp_path / "bomb.png").write_bytes(png(side, side))
    with pytest.raises(dt.FileFormatError, match=r"bomb\.png.*too large|bomb\.png.*pixels"):
        open_batches(tmp_path, [NCHW])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty.png", b""),
        ("text.jpg", b"not an image"),
        ("cut.png", png(8, 12)[:20]),
        ("zip.webp", b"PK\x03\x04" + bytes(50)),
        ("gif.png", b"GIF89a" + bytes(50)),  # other formats are not read, whatever the suffix
        ("none.bmp", b"BM" + bytes(60)),
    ],
)
def test_files_that_are_not_images(tmp_path, name, data):
    write(tmp_path / "a.png", pixels())
    (tmp_path / name).write_bytes(data)
    with pytest.raises(dt.FileFormatError, match=re.escape(name)):
        open_batches(tmp_path, [NCHW])


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_truncated_images_are_named(tmp_path, suffix, share):
    stream = io.BytesIO()
    Image.fromarray(pixels(40, 40)).save(stream, "JPEG" if suffix == "jpg" else suffix.upper())
    data = stream.getvalue()
    (tmp_path / f"cut.{suffix}").write_bytes(data[: int(share * len(data))])
    refusal(tmp_path, dt.FileFormatError, f"cut.{suffix}", "damaged")


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_is_an_error_of_detent_or_harmless(tmp_path, seed):
    rng = np.random.default_rng(seed)
    for suffix in ("png", "jpg", "webp", "bmp"):
        stream = io.BytesIO()
        Image.fromarray(pixels(20, 20)).save(stream, "JPEG" if suffix == "jpg" else suffix.upper())
        data = bytearray(stream.getvalue())
        for position in rng.integers(0, len(data), 6):
            data[position] = rng.integers(0, 256)
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(data)
        with suppress(dt.FileFormatError):  # other exceptions fail the test
            assert read(path)[0].shape == (1, 3, 8, 12)


def test_empty_and_mixed_directories(tmp_path):
    refusal(tmp_path, dt.SpecError, "holds no data", ".npz", "images", ".wav")
    (tmp_path / "sub").mkdir()
    refusal(tmp_path, dt.SpecError, "holds no data")
    write(tmp_path / "sub" / "a.png", pixels())
    write(tmp_path / "b.png", pixels())
    refusal(tmp_path, dt.SpecError, "b.png", "sub", "by class")
    (tmp_path / "b.png").unlink()
    np.savez(tmp_path / "c.npz", x=np.zeros((1, 3, 8, 12), F32))
    refusal(tmp_path, dt.SpecError, ".npz or .npy files and images", "one kind")


def test_options_of_other_kinds(tmp_path):
    write(tmp_path / "a.png", pixels())
    refusal(tmp_path, dt.SpecError, "rate", "images", preprocess="rate=16000")
    refusal(tmp_path, dt.SpecError, "tokenizer", ".txt", tokenizer="tokenizer.json")
    with pytest.raises(dt.SpecError, match=r"2 inputs \(x, mask\): pass a directory with one \.npz"):
        open_batches(tmp_path, [NCHW, InputInfo("mask", F32, (None,))])
    np.savez(tmp_path / "d.npz", x=np.zeros((1, 3, 8, 12), F32))
    refusal(tmp_path / "d.npz", dt.SpecError, "no preprocessing applies to arrays", "scale", preprocess="imagenet")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.png", pixels())
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    refusal(tmp_path, dt.UnsupportedError, "images need Pillow", "pip install 'detent[images]'")
