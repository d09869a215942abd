"""Exporting the float network, for its size, as a start for ``detent quantize``, and to compare layers with.

Batch norms are folded before the export, as in quantized files, so that both have the same tensors by the same names.
"""

import copy
from collections import OrderedDict
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from detent.errors import UnsupportedError
from detent.onnx_model import load, save
from detent.torch import export_graph
from detent.torch.onnx_export import quiet_exporter

__all__ = ["export_float", "without_norms"]

OPSET = 21


def without_norms(model: nn.Sequential) -> nn.Sequential:
    """A copy in evaluation mode, in which convolutions have taken up the batch norms that follow them.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU())
    >>> [type(each).__name__ for each in without_norms(model)]
    ['Conv2d', 'ReLU']
    """
    made: dict[str, nn.Module] = {}
    last = ""
    for name, each in copy.deepcopy(model).eval().named_children():
        before = made.get(last)
        if isinstance(each, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            made[last] = fuse_conv_bn_eval(before, each)
            continue
        made[name], last = each, name
    return nn.Sequential(OrderedDict(made)).eval()


def export_float(model: nn.Sequential, example: Tensor, path: Path) -> Path:
    """Write a float model as an ONNX file, tidied as quantized ones are, so that sizes compare.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = export_float(nn.Sequential(nn.Linear(4, 2)), torch.ones(2, 4), Path(folder, "float.onnx"))
    ...     [node.op_type for node in load(path).graph.node]
    ['Gemm']
    """
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            without_norms(model),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=({0: torch.export.Dim.AUTO},),
            output_names=["output"],
            verbose=False,
        )
    if program is None:
        raise UnsupportedError("torch.onnx.export returned nothing")
    version: str = import_module("detent").__version__  # by name: the package holds what lies above this layer, too
    save(load(export_graph.finalize(export_graph.clean(program.model_proto), version)), path)
    return path
