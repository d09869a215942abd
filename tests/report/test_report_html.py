"""Number formats of HTML reports."""

import math

import pytest

from detent.report.html import db, nbytes, noise_db, number, percent, signed, skip_argument


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(-0.12345), "\u22120.1235"),
        (number(123456), "123,456"),
        (number(None), "\u2013"),
        (number(-math.inf), "\u2212\u221e"),
        (db(-3.14), "\u22123.1"),
        (db(math.inf), "\u221e"),
        (percent(0.25), "25.0\u202f%"),
        (percent(0), "0\u202f%"),
        (percent(1e-5), "< 0.01\u202f%"),
        (nbytes(849_000), "849 kB"),
        (nbytes(512), "512 B"),
        (noise_db(0.01), "20.0"),
        (noise_db(0.0), "\u221e"),
        (noise_db(-1.0), "\u2013"),
        (signed(0.2), "+0.2"),
        (signed(-5), "\u22125"),
        (signed(0.01), "0"),
        (skip_argument("head[0] a"), "'head[[]0] a'"),
    ],
)
def test_texts(shown, text):
    assert shown == text
