"""Recorded work against the same work done anew each time. Only a GPU records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibeam.engine.graphs import Batch, Recorded, room
from calibeam.records import CalibeamError
from test_training import calibrated, data, log, scored, tune, weights  # noqa: F401

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_room_on_a_gpu_is_somewhat_more_and_of_few_sizes() -> None:
    sizes = [room(length, CUDA) for length in range(1, 513)]
    assert all(length <= size <= max(16, 1.5 * length) for length, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert [room(length, CUDA, per_octave=1) for length in (9, 33, 64, 65)] == [16, 64, 64, 128]


def test_room_never_exceeds_what_there_may_be() -> None:
    assert [room(length, CUDA, most=100) for length in (90, 97, 100, 120)] == [96, 100, 100, 120]
    assert [room(length, CPU) for length in (1, 9, 65)] == [1, 9, 65]


class Work:
    """Adds to a layer's gradients, and counts how often it is really called."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(4, 3).to(device), 0

    def __call__(self, batch: Batch) -> Tensor:
        self.calls += 1
        loss = (self.layer(batch["x"]) ** 2).sum() * batch["factor"]
        loss.backward()
        return loss.detach()[None]


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=needs_a_gpu)], ids=str)
def test_a_recording_does_what_the_function_does(device: torch.device) -> None:
    """For several shapes in turn, each with its own memory; a plain value makes another recording."""
    work, plain = Work(device), Work(device)
    recorded = Recorded(work, device)
    for turn in range(5):
        for rows, factor in ((2, 1.0), (5, 1.0), (5, 2.0)):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * turn + rows))
            found, expected = recorded({"x": x, "factor": factor}), plain({"x": x.to(device), "factor": factor})
            assert torch.allclose(found, expected, rtol=1e-5)
    for mine, theirs in zip(work.layer.parameters(), plain.layer.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert work.calls == (15 if device == CPU else 6)


@needs_a_gpu
@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_training_is_the_same_with_and_without(family: str, data: Path, model_folder: Any) -> None:  # noqa: F811
    """Shapes repeat over eight epochs, so most steps are replayed."""
    given = {"max_steps": 8, "learning_rate": 1e-3, "device": "cuda", "micro_batch_size": 4}
    model = model_folder(family)
    found = [log(tune(data, model, f"graphs-{on}", cuda_graphs=on, seed=1, **given), "train") for on in (True, False)]
    assert [step["loss"] for step in found[0].values()] == pytest.approx([s["loss"] for s in found[1].values()], rel=0.02)


@needs_a_gpu
@pytest.mark.parametrize("pairs", ["all", "sampled"])
def test_calibration_is_the_same_with_and_without(pairs: str, scored: dict[str, str]) -> None:  # noqa: F811
    given = {"max_steps": 8, "device": "cuda", "micro_batch_size": 4, "pairs": pairs, "learning_rate": 1e-4}
    found = [log(calibrated(scored, f"graphs-{on}", cuda_graphs=on, **given), "train") for on in (True, False)]
    for with_graphs, without in zip(*(each.values() for each in found), strict=True):
        assert with_graphs == pytest.approx(without, rel=0.02, abs=0.02)
    assert found[0][1]["regularization"] == pytest.approx(found[1][1]["regularization"], abs=1e-3) == pytest.approx(0.0, abs=1e-3)


@needs_a_gpu
def test_work_that_cannot_be_recorded_is_an_error_that_says_what_to_do() -> None:
    """The last test here: after it, this process can draw no random numbers on the GPU."""

    def waits(batch: Batch) -> Tensor:
        return torch.full((1,), batch["x"].sum().item(), device=CUDA)

    recorded = Recorded(waits, CUDA)
    assert recorded({"x": torch.ones(3)}).item() == 3.0
    with pytest.raises(CalibeamError, match="cuda_graphs=false"):
        recorded({"x": torch.ones(3)})
