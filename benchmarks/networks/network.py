"""A network with its data: functions that build, train and export it, generate inputs, and turn outputs into decisions.

``write`` trains once and keeps the ONNX file in a directory. Seeds are fixed: without training, the same call gives the
same bytes.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.onnx import TrainingMode

Array = NDArray[Any]
Feed = dict[str, Array]
Outputs = Sequence[Array]
Data = tuple[dict[str, Array], tuple[Array, ...]]  # inputs by name, targets
CALIBRATION_SAMPLES = 32
CALIBRATION_SEED, HELD_OUT_SEED, TRAINING_SEED = 1, 2, 3
TRAINING_BATCH = 16
MAX_RATES = {"cnn": 8e-3, "transformer": 1.5e-3, "recurrent": 6e-3, "mlp": 3e-3}
SHARED_EPOCHS_SAMPLES = 1024  # number of generated training samples; training repeats them


@dataclass(frozen=True)
class Export:
    """Export options of a model.

    Attributes:
        opset: opset of the file.
        dynamo: whether torch's newer exporter writes the file.
        dynamic: whether the batch size is dynamic.
        folds_norms: whether the exporter folds batch norms into convolutions where it can.
        finish: function that changes the exported graph.
        writer: function that writes the whole graph, instead of torch's exporter.
    """

    opset: int = 17
    dynamo: bool = False
    dynamic: bool = False
    folds_norms: bool = False
    finish: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None
    writer: Callable[[nn.Module], onnx.ModelProto] | None = None


@dataclass(frozen=True)
class Network:
    """A network, its data and its task.

    Attributes:
        build: function that creates the model with initial weights.
        data: function of a number of samples and a seed that returns inputs and targets.
        loss: function of the outputs and the targets that returns the training loss.
        kind: cnn, transformer, recurrent or mlp.
        decide: function that turns the outputs of a run into decisions, which ``zoo.agreement`` compares; None if the
            outputs are values, not decisions.
        export: export options.
        steps: training steps.
        rate: largest learning rate; None for the default of the kind.
        batch: samples per run in calibration and evaluation.
        held_out: number of held-out samples.
        after_training: function that changes the trained model, but not what it computes.
        training_data: training data of other shapes, if the model accepts several shapes.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int, int], Data]
    loss: Callable[..., Tensor]
    kind: str = "cnn"
    decide: Callable[[Outputs], Array] | None = None
    export: Export = field(default_factory=Export)
    steps: int = 160
    rate: float | None = None
    batch: int = 1
    held_out: int = 1024
    after_training: Callable[[nn.Module], None] | None = None
    training_data: Callable[[int, int], Data] | None = None

    def calibration_feeds(self) -> list[Feed]:
        """Return inputs of 32 samples."""
        return self._feeds(CALIBRATION_SAMPLES, CALIBRATION_SEED)

    def held_out_feeds(self) -> list[Feed]:
        """Return inputs that calibration does not use."""
        return self._feeds(self.held_out, HELD_OUT_SEED)

    def _feeds(self, count: int, seed: int) -> list[Feed]:
        inputs, _ = self.data(count, seed)
        parts = range(0, count, self.batch)
        return [{name: array[i : i + self.batch] for name, array in inputs.items()} for i in parts]

    def make(self, steps: int | None = None) -> nn.Module:
        """Build and train the model on one thread, and return it in evaluation mode."""
        torch.manual_seed(0)
        model = self.build()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with several threads, the last bits of sums vary
        train(self, model, self.steps if steps is None else steps)
        torch.set_num_threads(threads)
        model.eval()
        if self.after_training:
            with torch.no_grad():
                self.after_training(model)
        return model

    def to_onnx(self, model: nn.Module) -> onnx.ModelProto:
        """Export a model."""
        options = self.export
        exported = (
            options.writer(model) if options.writer else _exported(model, self._feeds(2 * self.batch, 1)[0], options)
        )
        exported = options.finish(exported) if options.finish else exported
        onnx.checker.check_model(exported)
        return exported

    def write(self, path: Path) -> Path:
        """Train and export, unless the file exists."""
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            model = self.to_onnx(self.make())
            partial = path.with_suffix(".partial")
            onnx.save(model, partial)
            partial.replace(path)
        return path


def train(network: Network, model: nn.Module, steps: int) -> None:
    """Train with AdamW and a cosine schedule with warm-up on generated samples."""
    if not steps:
        return
    inputs, targets = (network.training_data or network.data)(SHARED_EPOCHS_SAMPLES, TRAINING_SEED)
    columns = [torch.from_numpy(array) for array in (*inputs.values(), *targets)]
    rate = MAX_RATES[network.kind] if network.rate is None else network.rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    model.train()
    losses = []
    for step in range(steps):
        share = (step + 1) / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(10 * share, 0.5 + 0.5 * math.cos(math.pi * share))
        chosen = torch.randint(len(columns[0]), (TRAINING_BATCH,), generator=generator)
        batch = [column[chosen] for column in columns]
        outputs = model(*batch[: len(inputs)])
        loss = network.loss(outputs, *batch[len(inputs) :])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"trained {steps} steps, loss {np.mean(losses[-10:]):.3f} after {np.mean(losses[:10]):.3f}", file=sys.stderr)


def _exported(model: nn.Module, feed: Feed, options: Export) -> onnx.ModelProto:
    names = list(feed)
    arguments = tuple(torch.from_numpy(array) for array in feed.values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch
        results = model(*arguments)
        outputs = [f"output{i}" for i in range(len(results))] if isinstance(results, tuple) else ["output"]
        common: dict[str, Any] = {"opset_version": options.opset, "input_names": names, "output_names": outputs}
        if options.dynamo:
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torchvision is not needed
            batch = torch.export.Dim("batch", min=1, max=1024)
            shapes = tuple({0: batch} for _ in names) if options.dynamic else None
            program = torch.onnx.export(model, arguments, dynamo=True, dynamic_shapes=shapes, verbose=False, **common)
            return program.model_proto
        return _exported_by_tracing(model, arguments, options, common)


def _exported_by_tracing(
    model: nn.Module, arguments: tuple[Tensor, ...], options: Export, common: Mapping[str, Any]
) -> onnx.ModelProto:

    axes = {name: {0: "batch"} for name in (*common["input_names"], *common["output_names"])}
    mode = TrainingMode.EVAL if options.folds_norms else TrainingMode.PRESERVE
    file = BytesIO()
    torch.onnx.export(
        model,
        arguments,
        file,
        dynamo=False,
        training=mode,
        dynamic_axes=axes if options.dynamic else None,
        **common,
    )
    return onnx.load_from_string(file.getvalue())


def as_classes(outputs: Outputs) -> Array:
    """Decide on the class with the highest score."""
    return np.asarray(outputs[0].argmax(-1))
