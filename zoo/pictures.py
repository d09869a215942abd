"""Pictures: pages, lines of text, and crowds of faces, drawn only with NumPy.

They are similar enough to photographs and scans that face detectors and text readers react to them. A picture depends
only on its number: the first ten of a hundred pictures are the same as the first ten of ten.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["crowds", "pages", "text_lines", "text_pages"]

Array = NDArray[Any]
PAGE = (800, 608)
SCENE = (320, 384)
LINE, LINE_WIDTH = 48, 320
TEXT = (320, 320)
TEXTS = (
    "THE QUICK BROWN FOX JUMPS OVER A LAZY DOG WHILE 12 BOXING WIZARDS PACK MY BOX WITH FIVE DOZEN LIQUOR JUGS "
    "INVOICE TOTAL DATE PAGE NUMBER STREET PRICE 2024 365 708 NORTH EXIT OPEN SALE TICKET MARKET JUNE KEEP VALUE"
)
WORDS = tuple(TEXTS.split())
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Seven rows per letter from top to bottom, each of five dots: a digit of base 32.
ROWS = (
    "ehhvhhhuhhuhhuehgggheuhhhhhuvgguggvvggugggehgnhhfhhhvhhhe44444e72222ichikokihggggggv"
    "hrllhhhhpljhhhehhhhheuhhugggehhhliduhhukihfgge11uv444444hhhhhhehhhhha4hhhllrhhha4ahh"
    "hha4444v1248gvehjlphe4c4444eeh1248vv2421he26aiv22vgu11he68guhhev124888ehhehheehhf12c"
)


def pages(count: int) -> Iterator[Array]:
    """Yield pages with columns, lines of words and a picture: shape (800, 608, 3), values from 0 to 1.

    >>> next(pages(1)).shape
    (800, 608, 3)
    """
    rng = np.random.default_rng(0)
    for _ in range(count):
        page = np.full((*PAGE, 3), 0.97)
        columns = int(rng.integers(1, 3))
        for column in range(columns):
            left = 40 + column * (PAGE[1] - 60) // columns
            right = left + (PAGE[1] - 100) // columns
            for line in range(40, PAGE[0] - 60, int(rng.integers(14, 22))):
                at = left
                while at < right - 30 and rng.random() < 0.97:
                    word = int(rng.integers(8, 40))
                    ink = rng.random((9, word, 1)) < 0.45
                    page[line : line + 9, at : at + word] = np.where(ink, 0.1, page[line : line + 9, at : at + word])
                    at += word + 6
        top, side = int(rng.integers(100, 500)), int(rng.integers(40, 300))
        shades = np.cumsum(rng.normal(0, 0.02, (160, 220, 3)), axis=1) + rng.random(3)
        page[top : top + 160, side : side + 220] = np.clip(shades, 0, 1)
        yield page


def text_lines(count: int) -> Iterator[Array]:
    """Yield lines of one to three words, as a camera sees them: shape (48, 320, 3), values from 0 to 1.

    >>> next(text_lines(1)).shape
    (48, 320, 3)
    """
    for i in range(count):
        rng = np.random.default_rng([1, i])
        paper = _paper(rng, (LINE, LINE_WIDTH))
        text = " ".join(rng.choice(WORDS, int(rng.integers(1, 4))))
        ink = _ink(text, int(rng.integers(3, 6)))[: LINE - 4, : LINE_WIDTH - 8]
        top = (LINE - ink.shape[0]) // 2
        _print(paper, ink, top, 6, rng.uniform(0, 0.35, 3))
        yield _seen(rng, paper)


def text_pages(count: int) -> Iterator[Array]:
    """Yield signs and labels with words of several sizes: shape (320, 320, 3), values from 0 to 1.

    >>> next(text_pages(1)).shape
    (320, 320, 3)
    """
    for i in range(count):
        rng = np.random.default_rng([2, i])
        paper = _paper(rng, TEXT)
        top = int(rng.integers(8, 30))
        while top < TEXT[0] - 30:
            size = int(rng.integers(2, 5))
            ink = _ink(" ".join(rng.choice(WORDS, int(rng.integers(1, 5)))), size)[:, : TEXT[1] - 40]
            ink = ink[: TEXT[0] - top]
            _print(paper, ink, top, int(rng.integers(6, 34)), rng.uniform(0, 0.4, 3))
            top += ink.shape[0] + int(rng.integers(6, 30))
        yield _seen(rng, paper)


def crowds(count: int) -> Iterator[Array]:
    """Yield one to five faces in front of a background of soft shapes: shape (320, 384, 3), values from 0 to 1.

    >>> next(crowds(1)).shape
    (320, 384, 3)
    """
    for i in range(count):
        rng = np.random.default_rng([3, i])
        scene = _paper(rng, SCENE) * rng.uniform(0.4, 1)
        for _ in range(int(rng.integers(3, 9))):
            y, x, height, width = rng.uniform((0, 0, 15, 15), (*SCENE, 90, 90)).tolist()
            box = _disc(SCENE, y, x, height, width, 3.0)
            scene += box * (rng.random(3) - scene) * rng.uniform(0.3, 1)
        for _ in range(int(rng.integers(1, 6))):
            size = rng.uniform(14, 46)
            _draw_face(rng, scene, rng.uniform(size, SCENE[0] - size), rng.uniform(size, SCENE[1] - size), size)
        yield _seen(rng, scene)


def _draw_face(rng: np.random.Generator, scene: Array, y: float, x: float, size: float) -> None:
    """Draw neck, hair, skin with light from one side, eyes with brows, nose and mouth."""
    skin = np.array([0.85, 0.62, 0.5]) * rng.uniform(0.55, 1.1)
    dark = skin * 0.3

    def put(dy: float, dx: float, height: float, width: float, colour: Array, edge: float = 0.15) -> None:
        mask = _disc(SCENE, y + dy * size, x + dx * size, height * size, width * size, edge * size)
        scene[:] += mask * (colour - scene)

    put(1.3, 0, 0.7, 0.45, skin * 0.8)
    put(1.9, 0, 0.6, 1.1, rng.random(3))
    put(-0.25, 0, 1.05, 0.9, rng.uniform(0.05, 0.4) * np.array([1.0, 0.8, 0.6]))
    put(0.1, 0, 0.95, 0.72, skin)
    put(0.15, rng.choice([-0.35, 0.35]), 0.6, 0.25, skin * 0.85, 0.3)
    for side in (-0.3, 0.3):
        put(-0.27, side, 0.05, 0.2, dark, 0.05)
        put(-0.1, side, 0.09, 0.16, np.array([0.95, 0.95, 0.95]), 0.04)
        put(-0.1, side, 0.08, 0.07, np.array([0.08, 0.06, 0.05]), 0.04)
        put(0.3, side * 0.25, 0.05, 0.06, dark, 0.06)
    put(0.15, 0.05, 0.2, 0.06, skin * 1.12, 0.1)
    put(0.55, 0, 0.08, 0.28, np.array([0.65, 0.3, 0.3]) * rng.uniform(0.7, 1.1), 0.06)
    put(0.55, 0, 0.02, 0.24, dark, 0.03)


def _disc(shape: tuple[int, int], y: float, x: float, height: float, width: float, edge: float) -> Array:
    """Draw an ellipse with a soft edge: shape (..., 1), values from 0 to 1."""
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    far = np.sqrt(((rows - y) / height) ** 2 + ((columns - x) / width) ** 2)
    inside: Array = np.clip((1 - far) * min(height, width) / max(edge, 0.5) + 0.5, 0, 1)
    return inside[..., None]


def _paper(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Draw bright paper under uneven light."""
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    slope = rng.normal(0, 0.08, 2)
    light = rng.uniform(0.8, 0.98) + slope[0] * rows / shape[0] + slope[1] * columns / shape[1]
    paper: Array = np.clip(light[..., None] * rng.uniform(0.92, 1, 3), 0, 1)
    return paper


def _ink(text: str, size: int) -> Array:
    """Draw the dots of a text, each ``size`` pixels wide, with soft edges."""
    gap = np.zeros((7, 1))
    columns = [gap]
    for letter in text:
        place = 7 * LETTERS.find(letter)
        rows = [int(row, 32) for row in ROWS[place : place + 7]] if place >= 0 else [0] * 7
        columns += [np.array([[row >> bit & 1 for bit in range(4, -1, -1)] for row in rows], float), gap]
    large = np.kron(np.hstack(columns), np.ones((size, size)))
    padded = np.pad(large, 1)
    shifted = [np.roll(padded, (dy, dx), (0, 1)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    return np.asarray(np.mean(shifted, axis=0))


def _print(paper: Array, ink: Array, top: int, left: int, colour: Array) -> None:
    area = paper[top : top + ink.shape[0], left : left + ink.shape[1]]
    area += ink[: area.shape[0], : area.shape[1], None] * (colour - area)


def _seen(rng: np.random.Generator, picture: Array) -> Array:
    """Add the noise of a camera, and clip to 0..1."""
    seen: Array = np.clip(picture + rng.normal(0, rng.uniform(0.004, 0.02), picture.shape), 0, 1)
    return seen
