"""Observer: the base class of all observers. An observer keeps one range per parameter set.

Non-finite values are skipped and counted. Threads may share an observer: every method that reads or changes its state
holds the observer's lock.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from threading import RLock
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent import storage
from detent.checks import as_array, as_integer, first_index, float_array, plain, read_only
from detent.codec import check_version, parse, reading, table
from detent.errors import (
    DtypeError,
    FileFormatError,
    NotCalibratedError,
    RangeError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from detent.formats import Format
from detent.granularity import Granularity, PerTensor, Tiling, get_granularity, granularity_from_dict
from detent.kernels import minmax
from detent.params import QuantParams, check_scale_shape
from detent.spec import QuantSpec, get_spec
from detent.tables import counted

__all__ = ["Observer", "Range"]

STATE_VERSION = 1
METADATA = "detent.Observer"
Bounds = NDArray[np.floating]
Array = NDArray[Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Decorate a method of an observer: the method holds the observer's lock while it runs."""

    @wraps(method)
    def locked(self: "Observer", *args: Any, **options: Any) -> Any:  # noqa: ANN401 - the method's own arguments
        with self._lock:
            return method(self, *args, **options)

    return cast("Method", locked)


class Range(NamedTuple):
    """Lower and upper bounds, one pair per parameter set; both arrays have the shape of the scales."""

    lo: Bounds
    hi: Bounds


class Observer(ABC):
    """Base class of observers, which observe batches and keep one range per parameter set.

    Threads may share an observer: batches observed at the same time are added one after another. Copies share no state
    with the original. ``repr`` is the call that creates the observer; ``str`` also shows what it has observed.

    Attributes:
        granularity: determines which elements share a range.
        count: number of finite elements observed.
        nonfinite: number of NaN and infinite elements skipped.
    """

    state_type: ClassVar[str] = "float64"
    array_names: ClassVar[tuple[str, ...]] = ("lo", "hi")

    def __init__(self, granularity: Granularity | str = PerTensor()) -> None:
        self.granularity = get_granularity(granularity)
        self._lock = RLock()
        self.reset()

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; arrays are copied, because ``observe`` changes them in place."""
        state = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    @exclusive
    def reset(self) -> Self:
        """Discard everything observed."""
        self.count = 0
        self.nonfinite = 0
        self._double = False
        self._lo: Bounds | None = None
        self._hi: Bounds | None = None
        return self

    @exclusive
    def observe(self, x: ArrayLike, weight: ArrayLike | None = None) -> Self:
        """Observe one batch. All batches must have the same scale shape; their shapes and dtypes may differ.

        Args:
            x: float data.
            weight: importance weight of each element, broadcast to x; only for observers that keep a histogram.

        Raises:
            ShapeError: the scale shape differs from the scale shape of the first batch.

        >>> import numpy as np
        >>> from detent.observers import MinMax
        >>> MinMax().observe(np.array([1.0, np.nan, -2.0])).nonfinite
        1
        """
        data = float_array(x)
        tiling = self.granularity.tiling(data.shape)
        if self._lo is not None and self._lo.shape != tiling.scale_shape:
            raise ShapeError(
                f"a batch of shape {data.shape} gives ranges of shape {tiling.scale_shape} with granularity "
                f"{self.granularity}, but earlier batches gave {self._lo.shape}: use one observer per shape"
            )
        low, high, nonfinite = self._batch_bounds(data, tiling, weight)
        self._lo, self._hi = self._updated_bounds(*self._as_state(low, high))
        self.count += data.size - nonfinite
        self.nonfinite += nonfinite
        self._double |= data.dtype == np.float64
        return self

    def _batch_bounds(self, data: Array, tiling: Tiling, weight: ArrayLike | None) -> tuple[Bounds, Bounds, int]:
        """Return the bounds of a batch and the number of its non-finite elements; some subclasses update histograms."""
        if weight is not None:
            raise UnsupportedError(f"{self!r} does not support weight=: use MSE, Percentile or Entropy")
        return minmax(data, tiling)

    def _as_state(self, low: Bounds, high: Bounds) -> tuple[Bounds, Bounds]:
        """Convert bounds to ``state_type``; raise if they overflow. (inf, -inf) means that no value was finite."""
        if self.state_type == "float64":
            return low.astype(np.float64), high.astype(np.float64)
        with np.errstate(all="ignore"):
            lo, hi = low.astype(self.state_type), high.astype(self.state_type)
        if ((np.isinf(lo) | np.isinf(hi)) & ~(lo > hi)).any():
            raise RangeError(
                f"got the range [{np.min(low)}, {np.max(high)}], expected a range that fits {self.state_type} for "
                f"{self!r}: rescale the data or use MinMax"
            )
        return lo, hi

    def _updated_bounds(self, lo: Bounds, hi: Bounds) -> tuple[Bounds, Bounds]:
        """Return the union of the observer's bounds and the bounds of a batch; do not change the observer."""
        if self._lo is None or self._hi is None:
            return lo, hi
        return np.asarray(np.minimum(self._lo, lo)), np.asarray(np.maximum(self._hi, hi))

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Merge another observer of the same class and settings into this one."""

    def is_like(self, other: object) -> bool:
        """Return whether ``other`` has the same class and settings, so that it can be merged with this observer."""
        return isinstance(other, Observer) and type(other) is type(self) and self._settings() == other._settings()

    @contextmanager
    def _merging(self, other: Self) -> Iterator[None]:
        """Check that two observers can be merged, and hold both locks.

        Locks are taken in the same order for ``a.merge(b)`` and ``b.merge(a)``, so the two calls cannot deadlock.
        """
        if type(other) is not type(self):
            raise DtypeError(
                f"cannot merge {type(other).__name__} into {type(self).__name__}: merge observers of the same class"
            )
        if not self.is_like(other):
            raise StateError(f"cannot merge {other!r} into {self!r}: merge observers with the same settings")
        first, second = sorted((self, other), key=id)
        with first._lock, second._lock:
            mine, theirs = self._lo, other._lo
            if mine is not None and theirs is not None and mine.shape != theirs.shape:
                raise ShapeError(
                    f"cannot merge ranges of shapes {mine.shape} and {theirs.shape}, expected equal shapes: merge "
                    "observers of the same tensor"
                )
            yield

    def _absorb_counts(self, other: Self) -> None:
        self.count += other.count
        self.nonfinite += other.nonfinite
        self._double |= other._double

    @exclusive
    def range(self) -> Range:
        """Return the range of each parameter set, as read-only arrays.

        Raises:
            NotCalibratedError: nothing was observed, or some parameter set has no finite value.

        >>> from detent.observers import MinMax
        >>> MinMax().observe([1.0, -2.0]).range()
        Range(lo=array(-2.), hi=array(1.))
        """
        if self._lo is None or self._hi is None:
            raise NotCalibratedError(f"{self!r} has observed nothing: call observe(x) first")
        empty = self._lo > self._hi
        if empty.any():
            raise NotCalibratedError(
                f"{self!r} has observed no finite value in {int(empty.sum())} of {empty.size} parameter sets, first at "
                f"index {first_index(empty)} ({counted(self.nonfinite, 'non-finite value')} in total): pass finite "
                "values for every parameter set"
            )
        return Range(read_only(self._lo), read_only(self._hi))

    @exclusive
    def params(self, spec: QuantSpec | Format | str) -> QuantParams:
        """Compute quantization parameters from the observed range; the spec must have the observer's granularity.

        >>> import numpy as np
        >>> from detent.observers import MinMax
        >>> MinMax().observe(np.array([-1.0, 4.0], np.float32)).params("uint8").zero_point
        array(51, dtype=int32)
        """
        spec = get_spec(spec)
        if spec.granularity != self.granularity:
            raise ShapeError(
                f"the spec has granularity {spec.granularity}, but the observer has {self.granularity}: use the same "
                "granularity for both"
            )
        lo, hi = self._range_for(spec)
        return QuantParams.from_range(spec, lo, hi, dtype=self._scale_dtype)

    @property
    def _scale_dtype(self) -> str:
        return "float64" if self._double else "float32"

    def _range_for(self, spec: QuantSpec) -> Range:  # noqa: ARG002 - for observers that search
        return self.range()

    @property
    @exclusive
    def nbytes(self) -> int:
        """The size of the state in bytes."""
        return sum(array.nbytes for array in self._arrays().values())

    def max_nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the largest size that the state can have for data of this shape, in bytes."""
        return 2 * self.granularity.tiling(shape).sets * np.dtype(self.state_type).itemsize

    def _settings(self) -> dict[str, object]:
        """Return the constructor's arguments as JSON-ready data."""
        return {"granularity": self.granularity.to_dict()}

    def _counters(self) -> dict[str, int]:
        return {"count": self.count, "nonfinite": self.nonfinite, "double": int(self._double)}

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return everything observed: counters as integers, and ranges as arrays if anything was observed."""
        return {"version": STATE_VERSION, **self._counters(), **self._arrays()}

    def _arrays(self) -> dict[str, Array]:
        if self._lo is None or self._hi is None:
            return {}
        return {"lo": self._lo.copy(), "hi": self._hi.copy()}

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Discard everything observed, and load a state that ``state_dict`` returned.

        Raises:
            StateError: unexpected keys, an unsupported version, or values that no observer can have.
        """
        keys = {"version", *self._counters()}
        if not isinstance(state, Mapping) or set(state) not in (keys, keys | set(self.array_names)):
            given = sorted(state) if isinstance(state, Mapping) else state
            raise StateError(
                f"got a state with the keys {given!r}, expected {sorted(keys)} for {type(self).__name__}, and "
                f"{self.array_names} if anything was observed: pass the result of state_dict()"
            )
        check_version(plain(state["version"]), STATE_VERSION, "an observer state", error=StateError)
        counters = {
            name: as_integer(f"the state's {name}", plain(state[name]), at_least=0, error=StateError)
            for name in self._counters()
        }
        if "lo" not in state and any(counters.values()):
            raise StateError(
                f"got a state with the counters {counters!r} but without arrays, expected counters of 0: pass the "
                "result of state_dict()"
            )
        self._load_arrays({name: state[name] for name in self.array_names} if "lo" in state else {}, counters)
        self._load_counters(counters)
        return self

    def _load_arrays(self, arrays: Mapping[str, ArrayLike], counters: Mapping[str, int]) -> None:  # noqa: ARG002
        """Replace the observer's arrays with the arrays of a state; a StateError leaves the observer unchanged."""
        self._lo, self._hi = self._checked_bounds(arrays["lo"], arrays["hi"]) if arrays else (None, None)

    def _checked_bounds(self, lo: ArrayLike, hi: ArrayLike) -> tuple[Bounds, Bounds]:
        low, high = as_array("lo", lo), as_array("hi", hi)
        if low.dtype != self.state_type or high.dtype != self.state_type or low.shape != high.shape:
            raise StateError(
                f"the state's lo is {low.dtype} of shape {low.shape} and hi is {high.dtype} of shape {high.shape}, "
                f"expected {self.state_type} and equal shapes: pass the result of state_dict()"
            )
        try:
            check_scale_shape(self.granularity, low.shape, "lo")
        except ShapeError as error:
            raise StateError(f"the state does not fit {self!r}: {error}") from error
        unseen = (low == np.inf) & (high == -np.inf)
        if not (unseen | (np.isfinite(low) & np.isfinite(high) & (low <= high))).all():
            raise StateError(
                f"the state has lo {low!r} and hi {high!r}, expected finite bounds with lo <= hi, or (inf, -inf) if "
                "nothing was observed: pass the result of state_dict()"
            )
        return low.copy(), high.copy()

    def _load_counters(self, state: Mapping[str, int]) -> None:
        self.count, self.nonfinite, self._double = state["count"], state["nonfinite"], bool(state["double"])

    def to_bytes(self) -> bytes:
        """Serialize settings and state to bytes with a version, without pickle; equal observations give equal bytes.

        >>> import numpy as np
        >>> from detent.observers import MinMax
        >>> a = MinMax().observe(np.array([1.0])).observe(np.array([2.0]))
        >>> a.to_bytes() == MinMax().observe(np.array([2.0, 1.0])).to_bytes()
        True
        """
        state = self.state_dict()
        arrays: dict[str, Array] = {name: state.pop(name) for name in self.array_names if name in state}
        metadata = {"kind": type(self).__name__, "settings": self._settings(), "state": state}
        return storage.dumps(arrays, {METADATA: json.dumps(metadata)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Create an observer from bytes that ``to_bytes`` returned.

        Raises:
            FileFormatError: the bytes are malformed, or from an observer of another class.
        """
        arrays, metadata = storage.loads(data)
        with reading(f"the bytes do not contain a {cls.__name__}"):
            text = table(metadata, "the metadata", (METADATA,))[METADATA]
            entries = table(parse(text, METADATA), METADATA, ("kind", "settings", "state"))
            if entries["kind"] != cls.__name__:
                raise FileFormatError(
                    f"got the bytes of a {entries['kind']}, expected a {cls.__name__}: call from_bytes of the class "
                    "that wrote the bytes"
                )
            settings = {**entries["settings"], "granularity": granularity_from_dict(entries["settings"]["granularity"])}
            return cls(**settings).load_state_dict({**entries["state"], **arrays})

    def __repr__(self) -> str:
        defaults = signature(type(self)).parameters
        settings = {name: getattr(self, name) for name in self._settings()}
        changed = {name: value for name, value in settings.items() if value != defaults[name].default}
        if "granularity" in changed:
            changed["granularity"] = str(self.granularity)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @exclusive
    def __str__(self) -> str:
        if self._lo is None or self._hi is None or not self.count:
            return (
                f"{self!r}, {counted(self.nonfinite, 'non-finite value')}"
                if self.nonfinite
                else f"{self!r}, nothing observed"
            )
        seen = self._lo <= self._hi
        ranges = "" if seen.size == 1 else f" in {seen.size:,} parameter sets"
        skipped = f", {counted(self.nonfinite, 'non-finite value', ',')} skipped" if self.nonfinite else ""
        bounds = f"[{self._lo[seen].min():.6g}, {self._hi[seen].max():.6g}]"
        return f"{self!r}, {counted(self.count, 'value', ',')}{ranges} within {bounds}{skipped}"
