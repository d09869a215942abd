"""Sounds as data: formats, windows, rates, and every kind of bad file."""

import struct
import wave

import numpy as np
import pytest

import detent as dt
from detent.onnx_model import DataFiles
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import InputInfo
from detent.onnx_model.sound_data import EXTENSIBLE, FLOAT, PCM, WavFile

F32 = np.dtype("float32")
ROWS = InputInfo("x", F32, (None, 100))
ANY = InputInfo("x", F32, (None, None))


def chunk(name, data, size=None):
    return name + struct.pack("<I", len(data) if size is None else size) + data + bytes(len(data) % 2)


def wav(data, bits=16, channels=1, rate=16000, tag=PCM, before=(), **changes):
    """Return the bytes of a .wav file with that header, right or wrong."""
    block = changes.get("block", channels * bits // 8)
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)
    if tag == EXTENSIBLE:
        form += struct.pack("<HHIH", 22, bits, 0, changes.get("inner", PCM)) + bytes(14)
    form = changes.get("form", form)
    body = b"WAVE" + b"".join(before) + chunk(b"fmt ", form) + chunk(b"data", data, changes.get("size"))
    return changes.get("riff", b"RIFF") + struct.pack("<I", len(body)) + body


def write(path, samples, **options):
    """Write samples from -1 to 1 as 16-bit PCM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wav(np.round(np.asarray(samples) * 32768).clip(-32768, 32767).astype("<i2").tobytes(), **options))
    return path


def ramp(count, start=0):
    return (np.arange(count) + start) / 32768


def read(path, info=ROWS, preprocess=None, **options):
    return [feed[info.name] for feed in open_batches(DataFiles(path, preprocess=preprocess, **options), [info])]


def refusal(path, error, *words, info=ROWS, **options):
    with pytest.raises(error) as caught:
        read(path, info, **options)
    assert isinstance(caught.value, dt.DetentError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


# Formats


@pytest.mark.parametrize(
    ("bits", "tag", "data", "expected"),
    [
        (8, PCM, np.uint8([0, 128, 255]).tobytes(), [-1, 0, 127 / 128]),
        (16, PCM, np.array([-32768, 1, 32767], "<i2").tobytes(), [-1, 1 / 32768, 32767 / 32768]),
        (24, PCM, b"\x00\x00\x80" + b"\x01\x00\x00" + b"\xff\xff\x7f", [-1, 2.0**-23, 1 - 2.0**-23]),
        (32, PCM, np.array([-(2**31), 2**30], "<i4").tobytes(), [-1, 0.5]),
        (32, FLOAT, np.array([-1.5, 0.25], "<f4").tobytes(), [-1.5, 0.25]),
        (64, FLOAT, np.array([-0.1, 0.25], "<f8").tobytes(), [-0.1, 0.25]),
    ],
)
@pytest.mark.parametrize("is_extensible", [False, True])
def test_formats(tmp_path, bits, tag, data, expected, is_extensible):
    path = tmp_path / "a.wav"
    options = {"tag": EXTENSIBLE, "inner": tag} if is_extensible else {"tag": tag}
    path.write_bytes(wav(data, bits, **options, before=(chunk(b"LIST", b"odd"),)))
    (batch,) = read(path, ANY)
    assert batch.dtype == F32
    assert np.array_equal(batch, np.float32([expected]))


def test_files_of_the_standard_library(tmp_path):
    codes = np.arange(-5, 5, dtype="<i2") * 3000
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(codes.tobytes())
    assert np.array_equal(read(tmp_path / "a.wav", ANY)[0][0], (codes / 32768).astype(F32))


def test_channels_are_averaged(tmp_path):
    stereo = np.stack([ramp(50), ramp(50, 100)], axis=1)
    write(tmp_path / "a.wav", stereo, channels=2)
    (batch,) = read(tmp_path / "a.wav", ANY)
    assert np.array_equal(batch[0], ramp(50, 50).astype(F32))


# Windows and shapes


def test_windows_of_the_models_length(tmp_path):
    write(tmp_path / "b.wav", ramp(250))
    write(tmp_path / "a.wav", ramp(30, 1))
    batches = open_batches(tmp_path, [ROWS])
    assert batches.count == 4
    arrays = [feed["x"][0] for feed in batches]
    assert np.array_equal(arrays[0], np.r_[ramp(30, 1), np.zeros(70)].astype(F32))
    assert np.array_equal(np.concatenate(arrays[1:])[:250], ramp(250).astype(F32))
    assert not np.concatenate(arrays[1:])[250:].any()
    assert np.array_equal(next(iter(batches.subset([2])))["x"][0], ramp(100, 100).astype(F32))
    assert batches.notes == (
        "sounds: 2 files, 16,000 Hz, mono, 4 windows of 100 samples (if the model expects another rate, pass "
        "--preprocess rate=HZ)",
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((100,), [(100,)] * 3),
        ((None,), [(250,)]),
        ((1, 100), [(1, 100)] * 3),
        ((2, 100), [(2, 100)]),
        ((None, 1, 100), [(1, 1, 100)] * 3),
        ((None, None, None), [(1, 1, 250)]),
        ((None, 100, 1), [(1, 100, 1)] * 3),
        ((None, 1, 1), [(1, 1, 1)] * 250),
        (None, [(1, 250)]),
    ],
)
def test_shapes_of_inputs(tmp_path, shape, expected):
    write(tmp_path / "a.wav", ramp(250))
    assert [array.shape for array in read(tmp_path, InputInfo("x", F32, shape))] == expected


def test_sounds_of_a_batch_are_padded(tmp_path):
    for name, count in (("a", 3), ("b", 5), ("c", 2)):
        write(tmp_path / f"{name}.wav", ramp(count, 1))
    batches = read(tmp_path, ANY, batch_size=2)
    assert [array.shape for array in batches] == [(2, 5), (1, 2)]
    assert batches[0][0, 3:].tolist() == [0, 0]
    assert [array.shape for array in read(tmp_path, ANY, "length=4")] == [(1, 4)] * 4


def test_directories_are_classes(tmp_path):
    write(tmp_path / "yes" / "a.wav", ramp(250))
    write(tmp_path / "no" / "a.wav", ramp(50))
    batches = open_batches(tmp_path, [ROWS])
    assert (batches.classes, batches.labels.tolist()) == (("no", "yes"), [0, 1, 1, 1])


# Rates


def test_resampling_is_linear_and_the_same_in_every_window(tmp_path):
    values = np.random.default_rng(0).uniform(-1, 1, 1000)
    write(tmp_path / "a.wav", values, rate=16000)
    stored = read(tmp_path, ANY)[0][0]
    (whole,) = read(tmp_path, ANY, "rate=12000")
    expected = np.interp(np.arange(750) * (16000 / 12000), np.arange(1000), stored)
    assert np.allclose(whole[0], expected, atol=1e-7)
    windows = np.concatenate([array[0] for array in read(tmp_path, ROWS, "rate=12000")])
    assert np.array_equal(windows[:750], whole[0])
    (up,) = read(tmp_path, ANY, "rate=48000")
    assert up.shape == (1, 3000)
    assert np.array_equal(up[0, ::3], stored)


def test_rates_must_be_equal_or_given(tmp_path):
    write(tmp_path / "a.wav", ramp(100), rate=8000)
    write(tmp_path / "b.wav", ramp(200), rate=16000)
    refusal(tmp_path, dt.SpecError, "b.wav has 16000 Hz", "a.wav has 8000 Hz", "--preprocess rate=8000")
    batches = open_batches(DataFiles(tmp_path, preprocess="rate=16000"), [ANY])
    assert [feed["x"].shape for feed in batches] == [(1, 200), (1, 200)]
    assert batches.notes == ("sounds: 2 files, 16,000 Hz, mono, whole files, 1 resampled",)


# Bad input


GOOD = np.zeros(8, "<i2").tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["damaged, or not a .wav"]),
        (b"not a sound, only some text", ["does not begin like"]),
        (wav(GOOD, riff=b"RIFX"), ["does not begin like"]),
        (wav(b""), ["no samples"]),
        (wav(b"\0"), ["no samples"]),
        (wav(GOOD)[:-4], ["truncated", "b'data'", "16 bytes", "12"]),
        (wav(GOOD, size=0xFFFFFFFF), ["truncated"]),
        (wav(GOOD)[:30], ["truncated"]),
        (wav(GOOD)[:36], ["damaged"]),
        (wav(GOOD, tag=2), ["format 2", "16-bit PCM"]),
        (wav(GOOD, bits=12), ["12 bits"]),
        (wav(GOOD, bits=16, tag=FLOAT), ["format 3 with 16 bits"]),
        (wav(GOOD, channels=0, block=2), ["0 channels"]),
        (wav(GOOD, channels=999), ["999 channels"]),
        (wav(GOOD, rate=0), ["0 Hz"]),
        (wav(GOOD, block=3), ["frames of 3 bytes"]),
        (wav(GOOD, form=b"\1\0"), ["damaged"]),
        (wav(GOOD, before=[chunk(b"junk", b"")] * 1500), ["over 1000 chunks"]),
        (wav(np.array([0, np.nan], "<f4").tobytes(), 32, tag=FLOAT), ["NaN or infinite"]),
    ],
    ids=range(19),
)
def test_bad_files_are_named(tmp_path, data, words):
    write(tmp_path / "a.wav", ramp(10))
    (tmp_path / "bad.wav").write_bytes(data)
    refusal(tmp_path, dt.FileFormatError, "bad.wav", *words)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = write(tmp_path / "a.wav", ramp(100))
    sound = WavFile.open(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(dt.FileFormatError, match=r"a\.wav was truncated"):
        sound.read(0, 100)


def test_long_sounds_need_a_length(tmp_path, monkeypatch):
    monkeypatch.setattr("detent.onnx_model.sound_data.MAX_WINDOW", 100)
    write(tmp_path / "a.wav", ramp(101))
    refusal(tmp_path, dt.ShapeError, "101 samples", "length=16000", info=ANY)
    assert len(read(tmp_path, ANY, "length=60")) == 2
    monkeypatch.setattr("detent.onnx_model.sound_data.MAX_WINDOWS", 9)
    refusal(tmp_path, dt.ShapeError, "a.wav", "over 9 windows of 10 samples", info=ANY, preprocess="length=10")


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("float32", (None, 2, 100), ["(any, 2, 100)", "(batch, 1, samples)"]),
        ("float32", (None, 1, 1, 100), ["(any, 1, 1, 100)"]),
        ("int16", (None, 100), ["int16", "floats"]),
        ("float32", (), ["()"]),
    ],
)
def test_models_that_do_not_fit(tmp_path, dtype, shape, words):
    write(tmp_path / "a.wav", ramp(10))
    refusal(tmp_path, dt.ShapeError, *words, info=InputInfo("x", np.dtype(dtype), shape))


def test_options_that_do_not_fit(tmp_path):
    write(tmp_path / "a.wav", ramp(10))
    refusal(tmp_path, dt.SpecError, "only rate, length apply", "remove size", preprocess="size=8x8")
    refusal(tmp_path, dt.ShapeError, "length=5", "(any, 100)", preprocess="length=5")
    refusal(tmp_path, dt.ShapeError, "got 1 sounds", "batch size is 3", info=InputInfo("x", F32, (3, 100)))
