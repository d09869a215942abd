"""Activations: every QuantizeLinear of a file, fed what ONNX Runtime saw; level 1.

The tensor that a node got is quantized once more by detent, with the *source's* parameters, and the codes are compared.
A node with another scale or zero point than the source's has other codes throughout, even where their numbers agree.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import DetentError
from detent.ops import quantize
from detent.params import QuantParams
from detent.proof.artifact import Artifact, Site
from detent.proof.probe import Reading
from detent.proof.report import Difference
from detent.proof.source import Source
from detent.proof.tally import Tally, first_index
from detent.proof.weights import place_of, spread, ulps_between

__all__ = ["ActivationCheck"]

Array = NDArray[Any]


class ActivationCheck:
    """Level 1 for activations.

    Args:
        artifact: the file.
        source: what it was made from.
        tally: where codes are counted.

    >>> from onnx import parser
    >>> from detent.proof.source import OnnxSource
    >>> made = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> tally = Tally()
    >>> check = ActivationCheck(made, OnnxSource(made.model, made), tally)
    >>> check.readings()[0].take({"x": np.float32([0.5, 1.5]), "q": np.uint8([4, 7])})
    >>> print(tally.first)
    QuantizeLinear_q: another code, q[1] is 7, expected 6 (x 1.5, scale 0.5, zero point 3)
    """

    def __init__(self, artifact: Artifact, source: Source, tally: Tally) -> None:
        self._artifact, self._source, self._tally = artifact, source, tally
        self._noted: set[str] = set()
        self.notes: dict[str, None] = {}

    def readings(self) -> list[Reading]:
        """What has to be looked at."""
        return [self._reading(site) for site in self._artifact.sites]

    def _reading(self, site: Site) -> Reading:
        expected = self._source.expected(site)
        if expected is None:
            if self._source.knows_weights:
                self.notes[f"{site.node} is no quantizer of the source: compared with the file's own parameters"] = None
            return Reading((site.x, site.codes), self._taker(site, site.x, None, 0))
        return Reading((expected.x, site.codes), self._taker(site, expected.x, expected.params, expected.shift))

    def _taker(
        self, site: Site, name: str, params: QuantParams | None, shift: int
    ) -> Callable[[Mapping[str, Array]], None]:
        def take(arrays: Mapping[str, Array]) -> None:
            x, got = arrays[name], arrays[site.codes]
            try:
                own = site.how.params(x.shape) if params is None else params
                codes = quantize(x, own, nan="qmin").codes
            except DetentError as error:
                self._tally.count(got.size, got.size)
                self._note(site, (), None, None, (None, None, None), f"unsound parameters: {error}")
                return
            self._compare(site, x, got, codes, own, shift)

        return take

    def _compare(self, site: Site, x: Array, got: Array, codes: Array, params: QuantParams, shift: int) -> None:
        if codes.dtype.kind in "iu":
            bad = got.astype(np.int64) != codes.astype(np.int64) + shift
        else:  # small floats, which are read as float32; what is no number is so in both
            wide = codes.astype(np.float32)
            bad = ~((got == wide) | (np.isnan(got) & np.isnan(wide)))
        wrong = self._wrong_sets(site, params, shift, x.shape)
        everything = bad if wrong is None else bad | wrong
        differing = int(np.count_nonzero(everything))
        self._tally.count(got.size, differing)
        if bad.any() and site.node not in self._noted:
            index = first_index(bad)
            place = place_of(params, max(x.ndim, 1))
            scale, zero = (
                np.asarray(spread(part, place, x.shape))[index] for part in (params.scale, params.zero_point)
            )
            expected = codes[index].item() + (shift if codes.dtype.kind in "iu" else 0)
            about = float(x[index]), float(scale), int(zero) + shift
            self._note(site, index, expected, got[index].item(), about, "another code")

    def _wrong_sets(self, site: Site, params: QuantParams, shift: int, shape: tuple[int, ...]) -> Array | None:
        """Which elements have another scale or zero point in the file than in the source; None for none of them."""
        rank = max(len(shape), 1)
        here, there = place_of(site.how, rank), place_of(params, rank)
        how = site.how
        if here == there and np.array_equal(how.scale, params.scale):
            zeros = params.zero_point.astype(np.int64) + shift
            if np.array_equal(how.zero_point, zeros):
                return None
            self._note_parameter(site, params, how.zero_point != zeros, shift, is_scale=False)
            return spread(np.asarray(how.zero_point != zeros), here, shape)
        if here != there or how.scale.shape != params.scale.shape:
            cause = f"scales lie elsewhere: {here}, expected {there}"
            self._note(site, (), there.axis, here.axis, (None, None, None), cause)
            return np.ones(shape, bool)
        bad = np.asarray(how.scale != params.scale)
        self._note_parameter(site, params, bad, shift, is_scale=True)
        return spread(bad, here, shape)

    def _note_parameter(self, site: Site, params: QuantParams, bad: Array, shift: int, *, is_scale: bool) -> None:
        index = first_index(np.atleast_1d(bad))[: params.scale.ndim]
        scale, zero = float(params.scale[index]), int(params.zero_point[index]) + shift
        about = None, scale, zero
        if is_scale:
            got = float(site.how.scale[index])
            cause = f"another scale, {ulps_between(scale, got)} float32 away"
            self._note(site, index, scale, got, about, cause, site.scale)
        else:
            self._note(site, index, zero, int(site.how.zero_point[index]), about, "another zero point", site.zero_point)

    def _note(
        self,
        site: Site,
        index: tuple[int, ...],
        expected: float | None,
        got: float | None,
        about: tuple[float | None, float | None, int | None],
        cause: str,
        tensor: str = "",
    ) -> None:
        self._noted.add(site.node)
        self._tally.note(Difference(site.node, tensor or site.codes, index, expected, got, *about, cause))
