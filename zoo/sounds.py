"""Sounds: chords of plucked strings, speech-like voices, and the mel spectrogram of a sound.

A voice is a train of pulses through three resonances (formants) that move from vowel to vowel, with hisses and pauses
between them. A sound depends only on its number.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["chords", "log_mel", "voices"]

Array = NDArray[Any]
RATE = 16000
MUSIC_RATE, MUSIC_SAMPLES = 22050, 43844
TRIADS = ((0, 4, 7), (0, 3, 7), (0, 5, 9), (0, 4, 7, 11), (0, 12), (0,))
VOWELS = ((700, 1220, 2600), (400, 2000, 2550), (350, 640, 2240), (530, 1840, 2480), (570, 840, 2410), (310, 870, 2250))
BANDWIDTHS = (90, 110, 170)
WINDOW, HOP, MELS = 400, 160, 80
FLOOR, RANGE = 1e-10, 8.0


def chords(count: int) -> Iterator[Array]:
    """Yield two seconds of music, with three to six chords or notes: 22,050 Hz, shape (43844,), values from -1 to 1.

    >>> next(chords(1)).shape
    (43844,)
    """
    for i in range(count):
        rng = np.random.default_rng([4, i])
        sound = rng.normal(0, 0.001, MUSIC_SAMPLES)
        for start in np.sort(rng.integers(0, MUSIC_SAMPLES * 3 // 4, int(rng.integers(3, 7)))):
            root = int(rng.integers(40, 68))
            time = np.arange(MUSIC_SAMPLES - start) / MUSIC_RATE
            envelope = (1 - np.exp(-time / 0.006)) * np.exp(-time / rng.uniform(0.25, 0.9))
            for step in TRIADS[int(rng.integers(len(TRIADS)))]:
                pitch = 440 * 2 ** ((root + step - 69) / 12)
                for harmonic in range(1, 9):
                    strength = rng.uniform(0.5, 1) / harmonic**1.3
                    wave = np.sin(2 * np.pi * pitch * harmonic * time + rng.uniform(0, 6.28))
                    sound[start:] += strength * envelope * wave
        yield 0.8 * sound / np.abs(sound).max()


def voices(count: int, samples: int) -> Iterator[Array]:
    """Yield sentences of syllables and pauses: 16 kHz, ``samples`` values each, from -1 to 1.

    >>> next(voices(1, 8000)).shape
    (8000,)
    """
    for i in range(count):
        rng = np.random.default_rng([5, i])
        parts = [rng.normal(0, 0.002, int(rng.integers(200, 4000)))]
        pitch = rng.uniform(95, 220)
        while sum(map(len, parts)) < samples:
            parts.append(_syllable(rng, pitch))
            if rng.random() < 0.2:
                parts.append(rng.normal(0, 0.002, int(rng.integers(1600, 8000))))
        sound = np.concatenate(parts)[:samples]
        yield np.clip(sound + rng.normal(0, 0.001, samples), -1, 1)


def _syllable(rng: np.random.Generator, pitch: float) -> Array:
    """Return a vowel that changes into another vowel; in half of the cases, a hiss comes first."""
    length = int(rng.integers(1800, 4200))
    time = np.arange(length) / RATE
    contour = pitch * (1 + 0.12 * np.sin(2 * np.pi * rng.uniform(1, 4) * time + rng.uniform(0, 6.28)))
    phase = np.cumsum(contour) / RATE
    source = np.diff(np.floor(phase), prepend=0.0) + rng.normal(0, 0.01, length)
    first, second = (np.array(VOWELS[k]) for k in rng.integers(0, len(VOWELS), 2))
    blend = np.linspace(0, 1, length)[:, None]
    voiced = _resonances(source, first * (1 - blend) + second * blend)
    edge = np.minimum(1, np.minimum(time, time[::-1]) / 0.025)
    vowel: Array = edge * voiced / max(np.abs(voiced).max(), 1e-9) * rng.uniform(0.2, 0.6)
    if rng.random() < 0.5:
        hiss = np.diff(rng.normal(0, 1, int(rng.integers(600, 1800))), prepend=0.0)
        return np.concatenate([hiss * np.hanning(len(hiss)) * rng.uniform(0.02, 0.08), vowel])
    return vowel


def _resonances(source: Array, formants: Array) -> Array:
    """Filter a sound by a chain of two-pole resonators with moving frequencies."""
    for k, width in enumerate(BANDWIDTHS):
        radius = np.exp(-np.pi * width / RATE)
        turns = 2 * radius * np.cos(2 * np.pi * formants[:, k] / RATE)
        filtered, before, last = np.empty_like(source), 0.0, 0.0
        for i, (x, turn) in enumerate(zip(source.tolist(), turns.tolist(), strict=True)):
            before, last = last, (1 - radius) * x + turn * last - radius * radius * before
            filtered[i] = last
        source = filtered
    return source


def log_mel(sound: Array) -> Array:
    """Compute the mel spectrogram that Whisper models expect, of shape (80, samples / 160), from a sound of 16 kHz.

    The powers of windows of 400 samples are summed in 80 triangular filters on the mel scale (Slaney). Their log10 is
    limited to a range of 8, shifted and divided by 4 (Radford et al. 2022).

    >>> log_mel(np.sin(np.arange(1600.0))).shape
    (80, 10)
    """
    even = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(even, WINDOW // 2, mode="reflect"), WINDOW)[::HOP][:-1]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1])) ** 2
    logs = np.log10(np.maximum(power @ _triangles(), FLOOR)).T
    scaled: Array = (np.maximum(logs, logs.max() - RANGE) + 4) / 4
    return scaled.astype(np.float32)


def _triangles() -> Array:
    """Return overlapping triangular filters of area 1, as an array of shape (201, 80).

    Their frequencies are spaced linearly below 1 kHz and logarithmically above.
    """
    step = np.log(6.4) / 27
    mels = np.linspace(0, 15 + np.log(RATE / 2 / 1000) / step, MELS + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - bins) / np.diff(edges)[1:]
    shapes: Array = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return shapes
