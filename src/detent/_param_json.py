"""QuantParams as JSON: a version, the spec, and one entry per array. Used by ``detent.params``."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent._checks import as_shape, has_keys, unique_keys
from detent.errors import DetentError, ParamsError
from detent.spec import QuantSpec

VERSION = 1
_DTYPES = frozenset({"float32", "float64", "int32", "uint8"})


def dump(spec: QuantSpec, arrays: Mapping[str, NDArray[Any]]) -> str:
    """One line of JSON; every float survives the round trip."""
    data: dict[str, object] = {"version": VERSION, "spec": spec.to_dict()}
    for name, value in arrays.items():
        data[name] = {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.ravel().tolist()}
    return json.dumps(data)


def load(text: str) -> tuple[QuantSpec, dict[str, NDArray[Any]]]:
    """The spec and arrays that ``dump`` wrote."""
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
        version = data.pop("version")
        if type(version) is not int or version != VERSION:
            raise ParamsError(f"this detent reads QuantParams version {VERSION}, got {version!r}: update detent")
        return QuantSpec.from_dict(data.pop("spec")), {name: _array(entry) for name, entry in data.items()}
    except DetentError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ParamsError(f"not the JSON of a QuantParams: {error}") from error


def _array(entry: object) -> NDArray[Any]:
    """The array of one JSON entry; its shape and dtype must fit its values."""
    if not isinstance(entry, Mapping) or not has_keys(entry, ("dtype", "shape", "values")):
        raise ParamsError(f"a stored array has the keys dtype, shape and values, got {entry!r}")
    if entry["dtype"] not in _DTYPES or not isinstance(entry["values"], list):
        raise ParamsError(f"not an array of stored QuantParams: {entry!r}")
    values, shape = np.asarray(entry["values"]), as_shape(entry["shape"], error=ParamsError)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "fiu") or values.size != prod(shape):
        raise ParamsError(f"stored arrays hold as many numbers as their shape says, got {entry!r}")
    with np.errstate(all="ignore"):
        array = values.astype(entry["dtype"])
    if not (array == values).all():
        raise ParamsError(f"the numbers {entry['values']!r} do not fit {entry['dtype']}")
    return array.reshape(shape)
