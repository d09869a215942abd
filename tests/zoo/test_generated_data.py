"""Generated images and sounds: sizes, ranges, and that a real text recognizer can read the words."""

import numpy as np
import onnx
import pytest

from detent.onnx_model import make_session
from zoo import ZOO, pictures, sounds
from zoo.documents import MAKERS, documents


@pytest.mark.parametrize("make", [pictures.pages, pictures.text_lines, pictures.text_pages, pictures.crowds])
def test_pictures_lie_between_black_and_white(make):
    for picture in make(3):
        assert picture.shape[2] == 3
        assert 0 <= picture.min() < 0.4
        assert 0.6 < picture.max() <= 1


def test_every_letter_has_a_shape():
    assert len(pictures.ROWS) == 7 * len(pictures.LETTERS)
    assert {*"".join(pictures.WORDS)} <= {*pictures.LETTERS}
    shapes = {pictures.ROWS[7 * i : 7 * i + 7] for i in range(len(pictures.LETTERS))}
    assert len(shapes) == len(pictures.LETTERS)


def test_documents_are_told_apart():
    model = ZOO["magika"]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    session = make_session(model.path, threads=1)
    classes = [int(model.task(session.run(None, feed))[0]) for feed in model.feeds(len(MAKERS))]
    assert len({*classes}) >= 13
    assert len({*documents(64)}) == 64


def test_a_reader_reads_the_words():
    model = ZOO["ocr-recognizer"]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    facts = {entry.key: entry.value for entry in onnx.load(model.path).metadata_props}
    letters = ["", *facts["character"].split("\n"), " "]
    session = make_session(model.path, threads=1)
    recognized = 0
    for feed in model.feeds(8):
        steps = model.task(session.run(None, feed))[0]
        text = "".join(letters[k] for i, k in enumerate(steps) if k and (not i or steps[i - 1] != k))
        recognized += any(word in pictures.WORDS for word in text.split())
    assert recognized >= 5


@pytest.mark.parametrize("sound", [*sounds.chords(2), *sounds.voices(2, 16000)], ids=["a", "b", "c", "d"])
def test_sounds_are_neither_silent_nor_clipped(sound):
    assert 0.05 < np.abs(sound).max() <= 1
    assert np.isfinite(sound).all()


def test_a_tone_is_where_its_mel_says():
    spectrogram = sounds.log_mel(np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000))
    assert spectrogram.shape == (80, 100)
    assert spectrogram.dtype == np.float32
    band = spectrogram[:, 10:-10].mean(1).argmax()
    # 1 kHz is 15 of the 45.2 mels up to 8 kHz, which 81 steps divide.
    assert band == pytest.approx(15 / (15 + np.log(8) * 27 / np.log(6.4)) * 81 - 1, abs=1)


def test_a_spectrogram_spans_two_at_most():
    spectrogram = sounds.log_mel(next(sounds.voices(1, 16000)))
    assert spectrogram.max() - spectrogram.min() <= 2 + 1e-6
