"""Resuming in a new process gives the same bits as training without a stop."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import detent as dt  # noqa: E402
import detent.torch as qt  # noqa: E402

MODES = ("ema", "learned", "per_batch")


def make(mode: str) -> nn.Module:
    """A prepared model with a folded batch norm and plain layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 4)
    )
    return qt.prepare(model, dt.Recipe.preset("w4a4", mode=mode))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    model.train()
    for step in steps:
        x = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def result(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state, and the output in evaluation mode."""
    x = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return {**model.state_dict(), "evaluated": model.eval()(x)}


def resume(mode: str, folder: Path) -> None:
    """Resume training from a checkpoint, in the new process."""
    saved = torch.load(folder / "saved.pt", weights_only=True)
    model = make(mode)
    model.load_state_dict(saved["model"], strict=True)
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    torch.save(result(model), folder / "resumed.pt")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different


@pytest.mark.parametrize(
    "mode", [each if each == "learned" else pytest.param(each, marks=pytest.mark.slow) for each in MODES]
)
def test_a_new_process_resumes_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    model = make(mode)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, range(3, 6))
    threads = torch.get_num_threads()  # of the float operations, which are not ours
    code = f"import torch; torch.set_num_threads({threads}); from pathlib import Path; import test_resume"
    code += f"; test_resume.resume({mode!r}, Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, timeout=300)
    assert_equal(torch.load(tmp_path / "resumed.pt", weights_only=True), result(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_model_loaded_before_any_data_evaluates_the_same(mode: str) -> None:
    model = make(mode)
    train(model, optimizer_of(model), range(2))
    twin = make(mode)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert_equal(result(twin), result(model))


def _in_another_process(model: nn.Module, queue: multiprocessing.Queue) -> None:
    queue.put({key: value.clone().numpy() for key, value in result(model).items()})


def test_a_prepared_model_travels_to_a_spawned_process() -> None:
    model = make("ema")
    train(model, optimizer_of(model), range(2))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(model, queue))
    process.start()
    got = queue.get(timeout=120)
    process.join(timeout=60)
    assert_equal({key: torch.from_numpy(value) for key, value in got.items()}, result(model))
