"""Tensor contents: what a safetensors file of detent holds: a quantized tensor, or other arrays."""

from dataclasses import asdict
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent import storage
from detent.cli.contents import Contents, Held
from detent.errors import FileFormatError
from detent.metrics import code_usage
from detent.tensor import QuantizedTensor

__all__ = ["tensor_contents"]


def tensor_contents(path: str | PathLike[str]) -> Contents:
    """Read a safetensors file.

    Raises:
        FileFormatError: damaged, or with types that detent does not write.

    >>> import detent as dt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dt.quantize(np.zeros(3, np.float32), dt.QuantParams.int8_symmetric()).save(f"{folder}/q.safetensors")
    ...     tensor_contents(f"{folder}/q.safetensors").facts["spec"]
    'int8/tensor/symmetric/onnx'
    """
    arrays, metadata = storage.read(path)
    rows = [_row(name, array) for name, array in arrays.items()]
    facts = {"file": f"{fspath(path)}, {Path(path).stat().st_size:,} bytes, safetensors"}
    document: dict[str, Any] = {
        "file": fspath(path),
        "kind": "safetensors",
        "nbytes": Path(path).stat().st_size,
        "metadata": metadata,
    }
    try:
        tensor = QuantizedTensor.load(path)
    except FileFormatError:
        facts["metadata"] = ", ".join(metadata) or "none"
    else:
        values = tensor.dequantize("float32") if tensor.size else np.zeros(1, np.float32)
        low, high = float(values.min()), float(values.max())
        scale = np.asarray(tensor.params.scale, np.float32)
        about = {
            "spec": str(tensor.spec),
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            "nbytes": tensor.nbytes,
            "low": low,
            "high": high,
            "scales": int(scale.size),
            "smallest_scale": float(scale.min()),
            "largest_scale": float(scale.max()),
            "code_usage": code_usage(tensor) if tensor.size else 0.0,
        }
        document["quantized_tensor"] = about
        facts |= {
            "spec": str(tensor.spec),
            "tensor": f"{'x'.join(map(str, tensor.shape)) or 'scalar'}, {tensor.nbytes:,} bytes for {tensor.dtype}",
            "range": f"{low:.4g} .. {high:.4g}",
            "scales": f"{scale.size:,}, {float(scale.min()):.4g} .. {float(scale.max()):.4g}",
            "codes in use": f"{100 * float(str(about['code_usage'])):.1f} %",
        }
    document["tensors"] = [asdict(row) for row in rows]
    return Contents(facts, rows, document)


def _row(name: str, array: NDArray[Any]) -> Held:
    ends = (float(array.min()), float(array.max())) if array.size else (None, None)
    return Held(name, "array", array.dtype.name, array.shape, array.nbytes, *ends)
