"""Generated heartbeats, expressions, measurements, solids and spectrograms: inputs for networks, with labels."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from networks.series import SOUND_CLASSES, sounds

Array = NDArray[np.float32]
Labels = NDArray[np.int64]
LEADS, WAVES = 2, 5
BRACKETS, GROUPS, NAMES_PER_GROUP, OPERATORS = 3, 8, 12, 6
FIRST_NAME = 1 + 2 * BRACKETS + OPERATORS
SYMBOLS = FIRST_NAME + GROUPS * NAMES_PER_GROUP
SOLIDS, GRADES, QUANTITIES = 6, 5, 3
BANDS, WINDOW, HOP = 32, 256, 128
MAX_DEPTH = 5


@lru_cache(maxsize=4)
def heartbeats(count: int, steps: int, seed: int) -> tuple[Array, Labels]:
    """Generate two leads of a heart, of shape (count, 2, steps), and the wave at every step.

    The waves are 0 for rest, P, QRS, T, and the wide QRS of an extra beat.
    """
    rng = np.random.default_rng([seed, 41])
    leads, waves = rng.normal(0, 0.04, (count, LEADS, steps)), np.zeros((count, steps), np.int64)
    time = np.arange(steps)
    for i in range(count):
        gains, start, period = rng.uniform(0.5, 1.5, LEADS) * (1, -0.6), rng.uniform(-20, 20), rng.uniform(36, 64)
        while start < steps:
            is_extra = rng.random() < 0.2
            beat = ((-11, 2.5, 0.2, 1), (0, 1.2, 1.6, 2), (14, 4, 0.4, 3))
            for offset, spread, height, wave in ((2, 4.5, -2.2, 4), beat[2]) if is_extra else beat:
                distance = (time - start - offset) / spread
                leads[i] += np.outer(gains, height * rng.uniform(0.8, 1.2) * np.exp(-(distance**2) / 2))
                waves[i, np.abs(distance) < 2] = wave
            start += period * rng.uniform(0.9, 1.1)
        leads[i] += rng.normal(0, 0.3) * np.sin(2 * np.pi * time / rng.uniform(150, 400))
    return leads.astype(np.float32), waves


@lru_cache(maxsize=4)
def expressions(count: int, tokens: int, seed: int) -> tuple[Labels, Labels, Labels]:
    """Generate expressions with nested brackets of three kinds.

    Returns:
        Tokens of shape (count, tokens), the kind of the innermost bracket around each token (0 for none), and the group
        of names that the expression prefers.
    """
    rng = np.random.default_rng([seed, 42])
    rows, enclosing = np.empty((2, count, tokens), np.int64)
    groups = rng.integers(GROUPS, size=count)
    for i, group in enumerate(groups):
        stack: list[int] = []
        is_operand = True
        for k in range(tokens):
            rows[i, k], is_operand = _symbol(rng, stack, is_operand, int(group))
            enclosing[i, k] = stack[-1] if stack else 0
    return rows, enclosing, groups


def _symbol(rng: np.random.Generator, stack: list[int], is_operand: bool, group: int) -> tuple[int, bool]:
    """Return the next symbol, and whether an operand has to follow; opens or closes a bracket on the stack."""
    chance = rng.random()
    if is_operand and chance < 0.35 and len(stack) < MAX_DEPTH:
        stack.append(int(rng.integers(1, BRACKETS + 1)))
        return stack[-1], True
    if is_operand:
        chosen = group if rng.random() < 0.35 else int(rng.integers(GROUPS))
        return FIRST_NAME + chosen * NAMES_PER_GROUP + int(rng.zipf(1.6) - 1) % NAMES_PER_GROUP, False
    if stack and chance < 0.5:
        return BRACKETS + stack.pop(), False
    return 1 + 2 * BRACKETS + int(rng.integers(OPERATORS)), True


@lru_cache(maxsize=4)
def measurements(count: int, columns: int, seed: int) -> tuple[Array, Array, Labels]:
    """Generate rows of a laboratory: correlated numbers with heavy tails, three quantities, and one of five grades."""
    world, rng = np.random.default_rng(43), np.random.default_rng([seed, 43])
    causes = rng.normal(size=(count, 6))
    mixed = causes @ world.normal(0, 0.6, (6, columns)) + 0.3 * rng.standard_t(4, (count, columns))
    skewed = np.where(np.arange(columns) % 3 == 0, np.exp(mixed.clip(-4, 3)), mixed)
    rows = skewed * np.exp(world.uniform(-1.5, 2, columns)) + world.normal(0, 2, columns)
    bent = np.tanh(causes @ world.normal(0, 0.7, (6, 12)))
    quantities = bent @ world.normal(0, 0.5, (12, QUANTITIES)) * (1, 5, 20)
    grades = (bent @ world.normal(size=(12, GRADES))).argmax(-1)
    return rows.astype(np.float32), quantities.astype(np.float32), grades.astype(np.int64)


@lru_cache(maxsize=4)
def solids(count: int, points: int, seed: int) -> tuple[Array, Labels]:
    """Generate points on the surfaces of solids, of shape (count, 3, points), and which of six solids each is."""
    rng = np.random.default_rng([seed, 44])
    labels = rng.integers(SOLIDS, size=count)
    clouds = np.empty((count, 3, points), np.float32)
    for i, label in enumerate(labels):
        surface = _surface(rng, int(label), points) * rng.uniform(0.6, 1.2, (3, 1))
        turn = rng.uniform(0, 2 * np.pi)
        rotation = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
        clouds[i] = rotation @ surface + rng.normal(0, 0.02, surface.shape)
    return clouds, labels


def _surface(rng: np.random.Generator, label: int, points: int) -> NDArray[np.float64]:
    around, (x, y, z) = rng.uniform(0, 2 * np.pi, points), rng.uniform(-1, 1, (3, points))
    ring, length = np.stack([np.cos(around), np.sin(around)]), np.sqrt(x * x + y * y + z * z)
    if label == 0:
        return np.stack([x, y, z]) / length
    if label == 1:
        return np.stack([x, y, z]) / np.maximum(np.maximum(np.abs(x), np.abs(y)), np.abs(z))
    if label == 2:
        return np.concatenate([ring, z[None]])
    if label == 3:
        return np.concatenate([ring * (1 - z) / 2, z[None]])
    if label == 4:
        tube = np.pi * (x + 1)
        return np.concatenate([ring * (0.7 + 0.3 * np.cos(tube)), 0.3 * np.sin(tube)[None]])
    return np.stack([x, y, x * y])


@lru_cache(maxsize=4)
def spectrograms(count: int, samples: int, seed: int) -> tuple[Array, Labels]:
    """Generate logarithmic spectrograms of two sounds in a row, of shape (count, 1, 32, frames), and both kinds."""
    waves, kinds = sounds(2 * count, samples, seed)
    joined = waves.reshape(count, 2 * samples)
    frames = np.lib.stride_tricks.sliding_window_view(joined, WINDOW, 1)[:, ::HOP] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames))[..., 1:] ** 2
    bands = power.reshape(*power.shape[:2], BANDS, -1).mean(-1)
    logs = np.log10(bands + 1e-4).transpose(0, 2, 1)[:, None]
    return np.ascontiguousarray(logs, np.float32), kinds.reshape(count, 2) % SOUND_CLASSES
