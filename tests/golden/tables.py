"""Golden tables: numbers computed by hand from the documented formulas of five public quantization systems.

There is one TOML file per system. A file contains lists of tables; a table contains what its rows share (spec, scale,
zero point, straight-through estimator) and its rows. In every row, ``why`` derives the numbers from the formula, and
``deviates`` describes the system's own code where it differs from its documentation, which detent follows.

=========== ============================= ==========================================================
list        a table shares                a row has
=========== ============================= ==========================================================
forward     spec, scale, zero_point       x, code, y
gradient    spec, scale, zero_point, ste  x, gx (and g, if it differs from the table's)
range       spec                          lo, hi, scale, zero_point
ema         spec, decay                   lo, hi of the batch; ema_lo, ema_hi, scale, zero_point after it
learned     spec, scale, ste, grad_scale  x, gx, gs
=========== ============================= ==========================================================

A number is either a TOML number that float32 represents exactly, or a string: an exact expression that is rounded once
to float32. Expressions consist of ``+ - * / **``, decimals, ``s`` (the table's scale, as float32), and the float32
neighbors ``next(...)`` and ``prev(...)``.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detent as dt

SYSTEMS = ("oxicuda", "entrenar", "torsh", "rlx", "baracuda")

_SHARED = {
    "forward": ({"spec", "scale", "zero_point"}, set()),
    "gradient": ({"spec", "scale", "zero_point", "ste", "g"}, {"tolerance"}),
    "range": ({"spec"}, set()),
    "ema": ({"spec", "decay"}, set()),
    "learned": ({"spec", "scale", "ste", "grad_scale", "g"}, set()),
}
_COLUMNS = {
    "forward": {"x", "code", "y"},
    "gradient": {"x", "gx"},
    "range": {"lo", "hi", "scale", "zero_point"},
    "ema": {"lo", "hi", "ema_lo", "ema_hi", "scale", "zero_point"},
    "learned": {"x", "gx", "gs"},
}
_OPTIONAL = {"g", "deviates"}
_ESTIMATORS = {
    "convention": None,
    "identity": dt.ste.Identity(),
    "clipped on code": dt.ste.Clipped(),
    "clipped on value": dt.ste.Clipped(on="value"),
    "hard tanh": dt.ste.HardTanh(),
    "tanh of steps": dt.ste.Tanh(unit="step"),
    "tanh of range": dt.ste.Tanh(unit="range"),
}


def rounded(exact: Fraction) -> np.float32:
    """Round an exact number to float32, ties to the even mantissa."""
    near = np.float32(float(exact))
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    finite = [value for value in around if np.isfinite(value)]
    return min(finite, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1))


def number(value: int | float | str, scale: np.float32 | None = None) -> np.float32:
    """Convert a table entry to float32.

    >>> number(0.25), number("1/3"), number("prev(0.25)") < 0.25, number("3*s", np.float32(0.5))
    (np.float32(0.25), np.float32(0.33333334), np.True_, np.float32(1.5))
    """
    if isinstance(value, str):
        return rounded(_exact(value, ast.parse(value, mode="eval").body, scale))
    narrow = np.float32(value)
    if float(narrow) != value and not np.isnan(value):
        raise ValueError(f"float32 cannot represent {value!r}: write it as a string to round it")
    return narrow


def _exact(text: str, node: ast.expr, scale: np.float32 | None) -> Fraction:
    """Evaluate an expression exactly."""
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.get_source_segment(text, node) or "")
        case ast.Name(id="s") if scale is not None:
            return Fraction(float(scale))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exact(text, operand, scale)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _exact(text, left, scale), _exact(text, right, scale)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return a ** int(b)
        case ast.Call(func=ast.Name(id="next" | "prev" as name), args=[argument]):
            end = np.float32(np.inf if name == "next" else -np.inf)
            return Fraction(float(np.nextafter(rounded(_exact(text, argument, scale)), end)))
    raise ValueError(f"not an expression of the golden tables: {text!r}")


@dataclass(frozen=True)
class Case:
    """One row of a table, with the values that all its rows share."""

    system: str
    table: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def spec(self) -> dt.QuantSpec:
        """The table's spec."""
        return dt.QuantSpec.parse(self.table["spec"])

    @property
    def params(self) -> dt.QuantParams:
        """The table's scale and zero point."""
        return dt.QuantParams(self.spec, scale=self.scale, zero_point=self.table.get("zero_point", 0))

    @property
    def scale(self) -> np.float32:
        """The table's scale."""
        return number(self.table["scale"])

    @property
    def ste(self) -> dt.ste.Estimator | None:
        """The table's straight-through estimator; None for the convention's own."""
        return _ESTIMATORS[self.table["ste"]]

    @property
    def x(self) -> np.ndarray:
        """The row's input, an array of one element."""
        return self.array("x")

    @property
    def g(self) -> np.ndarray:
        """The row's upstream gradient, or the table's."""
        return np.array([number(self.row.get("g", self.table["g"]))])

    def array(self, column: str) -> np.ndarray:
        """A column's number as a float32 array of one element."""
        scale = self.scale if "scale" in self.table else None
        return np.array([number(self.row[column], scale)])


def tables(system: str, kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the tables of one kind; a misspelled or missing column is an error."""
    document = tomllib.loads((Path(__file__).parent / f"{system}.toml").read_text(encoding="utf-8"))
    if not set(document) <= set(_SHARED):
        raise ValueError(f"{system}.toml: unknown lists {sorted(set(document) - set(_SHARED))}")
    required, optional = _SHARED[kind]
    for table in document.get(kind, []):
        if not required | {"rows"} <= set(table) <= required | {"rows"} | optional:
            raise ValueError(f"{system}.toml: a {kind} table has {sorted(table)}, expected {sorted(required)} and rows")
        for row in table["rows"]:
            needed = _COLUMNS[kind] | {"why"}
            if not needed <= set(row) <= needed | _OPTIONAL:
                raise ValueError(f"{system}.toml: a {kind} row has {sorted(row)}, expected {sorted(needed)}")
        yield table


def cases(kind: str) -> list[Any]:
    """All rows of one kind from all systems, as pytest parameters."""
    parameters = []
    for system in SYSTEMS:
        for table in tables(system, kind):
            for row in table["rows"]:
                name = "-".join(str(row[column]) for column in ("x", "lo", "hi") if column in row)
                label = f"{system}-{table['spec']}-{table.get('ste', '')}-{name}".replace("--", "-")
                parameters.append(pytest.param(Case(system, table, row), id=label))
    return parameters


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal bit for bit (so +0.0 is not -0.0); any NaN equals any NaN."""
    if a.dtype != np.float32 or b.dtype != np.float32 or a.shape != b.shape:
        return False
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))
