"""Generated sounds, motions, texts and tables: inputs for networks on sequences, with labels."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Labels = NDArray[np.int64]
RATE = 8000
SOUND_CLASSES, MOTION_CLASSES, TOPICS, TABLE_CLASSES = 8, 6, 8, 4
WORDS = 2000
FIELDS, FIELD_VALUES = 6, 50


@lru_cache(maxsize=4)
def sounds(count: int, samples: int, seed: int) -> tuple[Array, Labels]:
    """Generate sounds of shape (count, 1, samples), and which of eight kinds each is."""
    rng = np.random.default_rng([seed, 11])
    time = np.arange(samples) / RATE
    waves, labels = np.empty((count, 1, samples), np.float32), rng.integers(SOUND_CLASSES, size=count)
    for i, label in enumerate(labels):
        tone, rate = rng.uniform(200, 1200), rng.uniform(4, 12)
        phase = 2 * np.pi * tone * time + rng.uniform(0, 6)
        kinds = (
            np.sin,
            lambda p: np.tanh(4 * np.sin(p)),
            lambda p: np.sin(p) * (0.5 + 0.5 * np.sin(2 * np.pi * rate * time)),  # noqa: B023 - called in the same iteration
            lambda p: np.sin(p + 8 * np.sin(2 * np.pi * rate * time)),  # noqa: B023
            lambda p: np.sin(p * (1 + time)),
            lambda p: np.sin(p * (1.5 - 0.5 * time / time[-1])),
            lambda p: (np.sin(p) + np.sin(1.5 * p) + np.sin(2 * p)) / 3,
            lambda p: np.convolve(rng.normal(size=p.size), np.ones(4) / 2, "same"),
        )
        loudness = np.exp(rng.uniform(-3, 0))
        waves[i, 0] = loudness * kinds[label](phase) + rng.normal(0, 0.03, samples)
    return waves, labels.astype(np.int64)


@lru_cache(maxsize=4)
def motions(count: int, steps: int, seed: int) -> tuple[Array, Labels]:
    """Generate readings of six sensors, of shape (count, steps, 6) and different ranges, and the kind of motion."""
    rng = np.random.default_rng([seed, 12])
    time = np.linspace(0, 1, steps)[:, None]
    labels = rng.integers(MOTION_CLASSES, size=count)
    shapes = np.random.default_rng(12).normal(0, 1, (MOTION_CLASSES, 3, 6))
    speed, phase = rng.uniform(2, 6, (count, 1, 1)), rng.uniform(0, 6, (count, 1, 1))
    waves = [np.sin(2 * np.pi * (k + 1) * speed * time + phase) * shapes[labels, k][:, None] for k in range(3)]
    readings = sum(waves) + rng.normal(0, 0.7, (count, steps, 6))
    ranges = np.array([1, 1, 1, 5, 5, 20], np.float32)
    return (readings * ranges).astype(np.float32), labels.astype(np.int64)


@lru_cache(maxsize=4)
def texts(count: int, tokens: int, seed: int) -> tuple[Labels, Labels, Labels]:
    """Generate tokens of shape (count, tokens), their mask, and the topic of each text; 0 pads short texts.

    A topic prefers some words. Half of the words are determined by the previous word.
    """
    world = np.random.default_rng(13)
    follows = world.integers(1, WORDS, WORDS)
    preferred = world.integers(1, WORDS, (TOPICS, 60))
    rng = np.random.default_rng([seed, 13])
    topics = rng.integers(TOPICS, size=count)
    rows = np.zeros((count, tokens), np.int64)
    for i, topic in enumerate(topics):
        length = int(rng.integers(tokens // 2, tokens + 1))
        drawn = np.where(
            rng.random(length) < 0.12, rng.choice(preferred[topic], length), 1 + rng.zipf(1.3, length) % (WORDS - 1)
        )
        for k in range(1, length):
            drawn[k] = follows[drawn[k - 1]] if rng.random() < 0.4 else drawn[k]
        rows[i, :length] = drawn
    return rows, (rows > 0).astype(np.int64), topics.astype(np.int64)


@lru_cache(maxsize=4)
def tables(count: int, columns: int, seed: int) -> tuple[Array, Labels, Labels]:
    """Generate rows of a table: numbers of different ranges, categories, and one of four classes."""
    world, rng = np.random.default_rng(14), np.random.default_rng([seed, 14])
    plain = rng.normal(size=(count, columns))
    fields = rng.integers(FIELD_VALUES, size=(count, FIELDS))
    hidden = np.tanh(plain @ world.normal(0, 0.5, (columns, 16)))
    for k in range(FIELDS):
        hidden += 0.5 * world.normal(size=(FIELD_VALUES, 16))[fields[:, k]]
    labels = (hidden @ world.normal(size=(16, TABLE_CLASSES))).argmax(-1)
    ranges = np.exp(world.uniform(-1, 3, columns))
    return (plain * ranges).astype(np.float32), fields.astype(np.int64), labels.astype(np.int64)
