"""Checkpoints: everything comes back, and nothing that is torn, changed or incomplete is ever loaded."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from calibeam import checkpoint
from calibeam.checkpoint import Position
from calibeam.records import CalibeamError


class Run:
    """A small model in training."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        self.model.device = torch.device("cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

    def step(self) -> Tensor:
        loss = self.model(torch.rand(4, 3)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        position = Position({"given": step}, {"x": torch.arange(3)})
        checkpoint.save(folder, {"step": step}, self.model, self.optimizer, self.schedule, lambda: position)

    def load(self, folder: Path) -> Any:
        return checkpoint.load(folder, self.model, self.optimizer, self.schedule)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Run]:
    run = Run()
    for step in (1, 2, 3):
        run.step()
        run.save(tmp_path, step)
    return tmp_path, run


def test_fault_13_a_run_goes_on_to_the_same_bits(saved: tuple[Path, Run]) -> None:
    """Weights, optimizer, schedule and random numbers: the next losses are equal only if all of them are."""
    folder, run = saved
    expected = [run.step() for _ in range(3)]
    other = Run(seed=9)
    facts, position = other.load(folder)
    assert facts == {"step": 3}
    assert position.facts == {"given": 3}
    assert torch.equal(position.tensors["x"], torch.arange(3))
    assert [other.step() for _ in range(3)] == expected


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert Run().load(tmp_path) is None


def test_fault_10_the_last_two_are_kept_by_their_steps_whatever_the_clock_says(tmp_path: Path) -> None:
    run = Run()
    for step in (8, 9, 10, 100):
        run.step()
        run.save(tmp_path, step)
        os.utime(files(tmp_path)[-1], (1e9 - step, 1e9 - step))  # the clock runs backwards
    assert [file.name for file in files(tmp_path)] == ["checkpoint-000000010.safetensors", "checkpoint-000000100.safetensors"]
    assert Run().load(tmp_path)[0] == {"step": 100}


@pytest.mark.parametrize("place", range(0, 2000, 97))
def test_fault_17_a_flipped_bit_anywhere_is_noticed_and_the_one_before_is_loaded(place: int, saved: tuple[Path, Run]) -> None:
    folder, _ = saved
    content = bytearray(files(folder)[-1].read_bytes())
    content[place % len(content)] ^= 1 << place % 8
    files(folder)[-1].write_bytes(content)
    assert Run().load(folder)[0] == {"step": 2}


def test_fault_17_a_damaged_checkpoint_never_takes_the_place_of_the_good_one_before_it(saved: tuple[Path, Run]) -> None:
    """The run goes on from 2, and is killed while it saves 4."""
    folder, run = saved
    os.truncate(files(folder)[-1], 100)
    assert run.load(folder)[0] == {"step": 2}
    checkpoint.drop_after(folder, 2)
    assert [file.name for file in files(folder)] == ["checkpoint-000000002.safetensors"]
    with patch.object(checkpoint, "save_file", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        run.save(folder, 4)
    assert run.load(folder)[0] == {"step": 2}


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_fault_17_a_truncated_checkpoint_is_noticed_and_the_one_before_is_loaded(size: int, saved: tuple[Path, Run]) -> None:
    folder, _ = saved
    os.truncate(files(folder)[-1], size if size >= 0 else files(folder)[-1].stat().st_size + size)
    assert Run().load(folder)[0] == {"step": 2}
    os.truncate(files(folder)[-2], 50)
    with pytest.raises(CalibeamError, match=r"000003\.safetensors is damaged.*000002\.safetensors is damaged.* to start again"):
        Run().load(folder)


@pytest.mark.parametrize(
    ("tensors", "told", "message"),
    [
        ("optimizer.", "", "lacks what is needed to resume: optimizer"),
        ("random.", "", "lacks what is needed to resume: random.cpu"),
        ("optimizer.1.", "", "lacks what is needed to resume: optimizer.1.step, optimizer.1.exp_avg"),
        ("optimizer.0.exp_avg_sq", "", "lacks what is needed to resume: optimizer.0.exp_avg_sq"),
        ("model.bias", "", "lacks what is needed to resume: model.bias"),
        (None, "schedule", "lacks what is needed to resume: schedule"),
        (None, "data", "lacks what is needed to resume: data"),
    ],
)
def test_fault_16_a_checkpoint_that_lacks_a_part_is_an_error(
    tensors: str | None, told: str, message: str, saved: tuple[Path, Run]
) -> None:
    """Made without it, digest and all."""
    folder, _ = saved
    facts, parts = checkpoint.read(files(folder)[-1])
    facts.pop(told, None)
    kept = {name: value for name, value in parts.items() if tensors is None or not name.startswith(tensors)}
    checkpoint.write(files(folder)[-1], facts, kept)
    with pytest.raises(CalibeamError, match=re.escape(message)):
        Run().load(folder)


@pytest.mark.parametrize(
    "other",
    [
        {"schedule": {}}, {"schedule": [1]}, {"groups": []}, {"groups": [{}]}, {"groups": "x"}, {"loop": 3}, {"data": None},
        {"shares": 5}, {"shares": [1]}, {"shares": [["../../elsewhere", "0"]]}, {"device": 7}, {"holds": "x"},
    ],
)  # fmt: skip
def test_fault_16_a_checkpoint_that_tells_other_things_than_any_does_is_an_error(
    other: dict[str, Any], saved: tuple[Path, Run]
) -> None:
    folder, _ = saved
    for file in files(folder):
        facts, parts = checkpoint.read(file)
        checkpoint.write(file, {**facts, **other}, parts)
    with pytest.raises(CalibeamError, match=r"lacks what is needed|is damaged|was written on 7"):
        Run().load(folder)


def test_fault_12_a_checkpoint_of_another_kind_of_device_is_an_error(saved: tuple[Path, Run]) -> None:
    folder, _ = saved
    facts, parts = checkpoint.read(files(folder)[-1])
    checkpoint.write(files(folder)[-1], {**facts, "device": "cuda"}, parts)
    with pytest.raises(CalibeamError, match="was written on cuda, and this is cpu: resume with device=cuda"):
        Run().load(folder)


def test_fault_21_weights_that_are_not_finite_are_not_saved(saved: tuple[Path, Run]) -> None:
    folder, run = saved
    before = {file: file.read_bytes() for file in files(folder)}
    with torch.no_grad():
        run.model.weight[0, 1] = torch.inf
    with pytest.raises(CalibeamError, match=r"not finite after step 4: model\.weight"):
        run.save(folder, 4)
    assert {file: file.read_bytes() for file in files(folder)} == before


def share_out(folder: Path, shares: int) -> list[Path]:
    """The newest checkpoint as so many processes would have written it, some of which have no row of the bias."""
    (told, tensors), step, names = checkpoint.read(files(folder)[-1]), files(folder)[-1].stem[-9:], []
    rows = {name: tensors.pop(name).tensor_split(shares) for name in [*tensors] if "model." in name or "exp_avg" in name}
    for number in range(shares):
        own = {name: parts[number] for name, parts in rows.items()}
        first = {name: sum(map(len, parts[:number])) for name, parts in rows.items()}
        file = folder / f"share-{step}-{number}-of-{shares}.safetensors"
        names.append([file.name, checkpoint.write(file, {"first": first}, own)])
    checkpoint.write(files(folder)[-1], {**told, "shares": names}, tensors)
    return [folder / name for name, _ in names]


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_a_run_goes_on_with_what_several_processes_wrote(shares: int, saved: tuple[Path, Run]) -> None:
    folder, run = saved
    share_out(folder, shares)
    expected, other = [run.step() for _ in range(3)], Run(seed=9)
    assert other.load(folder)[0] == {"step": 3}
    assert [other.step() for _ in range(3)] == expected


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "of another save"])
def test_fault_17_a_damaged_share_is_noticed_and_the_checkpoint_before_is_loaded(damage: str, saved: tuple[Path, Run]) -> None:
    folder, _ = saved
    share = share_out(folder, 3)[1]
    content = bytearray(share.read_bytes())
    if damage == "of another save":
        told, tensors = checkpoint.read(share)
        checkpoint.write(share, told, {name: rows + 1 for name, rows in tensors.items()})
    elif damage == "missing":
        share.unlink()
    elif damage == "truncated":
        os.truncate(share, len(content) - 1)
    else:
        content[-1] ^= 1
        share.write_bytes(content)
    assert Run().load(folder)[0] == {"step": 2}


def test_fault_01_shares_without_the_file_that_names_them_count_for_nothing_and_are_removed(saved: tuple[Path, Run]) -> None:
    folder, run = saved
    shares = share_out(folder, 2)
    files(folder)[-1].unlink()
    (folder / ".share-000000004-0-of-2.safetensors.partial").touch()
    assert Run().load(folder)[0] == {"step": 2}
    assert all(share.exists() for share in shares)
    run.save(folder, 4)
    assert sorted(file.name for file in folder.iterdir()) == [
        "checkpoint-000000002.safetensors",
        "checkpoint-000000004.safetensors",
    ]


def test_a_damaged_checkpoint_never_takes_the_place_of_the_one_before_it(
    saved: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the damaged one is written anew."""
    folder, run = saved
    os.truncate(files(folder)[-1], 100)
    assert run.load(folder)[0] == {"step": 2}
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: sys.exit(9))
    with pytest.raises(SystemExit):
        run.save(folder, 3)
    assert Run().load(folder)[0] == {"step": 2}


def test_fault_46_a_pickle_in_place_of_a_checkpoint_is_not_run(tmp_path: Path, saved: tuple[Path, Run]) -> None:
    folder, run = saved

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it-ran"),)

    for file in files(folder):
        torch.save({"model": run.model.state_dict(), "evil": Evil()}, file)
    with pytest.raises(CalibeamError, match="is damaged"):
        Run().load(folder)
    assert not (tmp_path / "it-ran").exists()


def test_fault_05_a_checkpoint_that_does_not_fit_says_how_much_it_needs(
    saved: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = saved
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 990, 10))  # type: ignore[attr-defined]
    with pytest.raises(CalibeamError, match=r"needs [\d,]+ bytes, and 10 are free there\. The checkpoint before it is kept"):
        run.save(folder, 4)
    assert Run().load(folder)[0] == {"step": 3}
