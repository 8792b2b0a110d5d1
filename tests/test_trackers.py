"""Trackers are told what the log is told."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from calibeam import recipe, stages, trackers
from calibeam.records import CalibeamError
from calibeam.stages import prepare


def events(folder: Path) -> dict[tuple[int, str], float]:
    """What TensorBoard's files hold: records of a length, its checksum, a message and that one's checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in folder.rglob("events.out.tfevents.*"):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
            place += 16 + length
    return found


def test_tensorboard_is_told_what_the_log_is_told(tmp_path: Path, rows_file: Any, model_folder: Any) -> None:
    rows = str(rows_file("rows.jsonl", 8, 0))
    data = prepare.run(prepare.Config(output=str(tmp_path / "data"), train=rows, validation=rows, test=rows))
    settings = {
        "data": str(data), "model": str(model_folder("pegasus")), "output": str(tmp_path / "run" / "tuned"), "batch_size": 4,
        "max_steps": 3, "eval_steps": 2, "max_source_length": 24, "max_target_length": 10, "device": "cpu",
        "report_to": ["tensorboard"],
    }  # fmt: skip
    folder = stages.load("finetune").run(recipe.build(stages.load("finetune").Config, "finetune", settings))
    logged: dict[tuple[int, str], float] = defaultdict(float)
    for record in map(json.loads, (folder / "log.jsonl").read_text().splitlines()):
        step = record.pop("step")
        logged |= {(step, f"{kind}/{name}"): value for kind, figures in record.items() for name, value in figures.items()}
    assert {tag for _, tag in logged} == {"train/loss", "train/learning_rate", "validation/perplexity"}
    assert events(tmp_path / "run" / "runs" / "tuned") == pytest.approx(logged, rel=1e-6)
    assert not [*folder.rglob("events.out.tfevents.*")]  # the folder of a stage is sealed


def test_a_tracker_that_is_not_there_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "NEEDS", {"tensorboard": ("no_such_package",)})
    with pytest.raises(CalibeamError, match="report_to=tensorboard needs accelerate and no_such_package"):
        trackers.check_installed(["tensorboard"])
    with pytest.raises(CalibeamError, match="report_to"):
        recipe.build(
            stages.load("finetune").Config, "finetune", {"output": "o", "data": "d", "model": "m", "report_to": ["paper"]}
        )
