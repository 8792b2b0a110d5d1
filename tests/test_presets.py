"""Presets: every one of them is a recipe that can be planned, and a recipe's own settings win."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibeam import pipeline, presets
from calibeam.cli import app
from calibeam.records import CalibeamError
from calibeam.stages import calibrate, decode

RECIPE = {"output": "out", "model": "some/model", "prepare": {"train": "a.jsonl", "validation": "b.jsonl"}}


def settings(name: str, stage: str, **tables: object) -> dict[str, object]:
    return next(s.config for s in pipeline.plan({**RECIPE, "preset": name, **tables}) if s.stage == stage).resolved()


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_setting_of_a_preset_reaches_its_stage(name: str) -> None:
    for stage, wanted in presets.PRESETS[name].items():
        assert settings(name, stage, finetune={}).items() >= wanted.items()


def test_a_recipe_wins_over_its_preset() -> None:
    assert settings("brio", "decode", decode={"num_candidates": 8})["num_candidates"] == 8
    assert settings("brio", "decode", decode={"num_candidates": 8})["method"] == "diverse_beam"


def test_slic_is_what_the_stages_do_anyway() -> None:
    for stage, module in (("decode", decode), ("calibrate", calibrate)):
        for key, value in presets.PRESETS["slic"][stage].items():
            assert getattr(module.Config, key) == value


def test_all_pairs_is_slic_but_for_pairs_and_learning_rates() -> None:
    slic, own = presets.PRESETS["slic"], presets.PRESETS["all-pairs"]
    rates = {"pairs": "all", "learning_rate": [1e-5, 1e-4], "lr_scheduler_type": "linear"}
    assert own == {**slic, "calibrate": {**slic["calibrate"], **rates}}


def test_a_preset_does_not_ask_for_fine_tuning() -> None:
    assert "finetune" not in [step.stage for step in pipeline.plan({**RECIPE, "preset": "slic"})]


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(CalibeamError, match="unknown preset bri; did you mean brio"):
        pipeline.plan({**RECIPE, "preset": "bri"})


def test_calibrate_model_takes_a_preset(
    tmp_path: Path, model_folder: Callable[..., Path], rows_file: Callable[..., Path]
) -> None:
    """With eight candidates, not sixteen: what is typed wins."""
    files = ["--train", rows_file("train.jsonl", 8), "--validation", rows_file("validation.jsonl", 6, first=50)]
    options = ["--max-source-length", 24, "--max-target-length", 8, "--num-candidates", 8, "--output", tmp_path / "out"]
    small = ["calibrate.batch_size=8", "calibrate.max_steps=1", "calibrate.select=perplexity", "evaluate.num_candidates=[2]"]
    arguments = ["calibrate-model", "--preset", "brio", "--model", model_folder("t5"), *files, *options, *small]
    found = CliRunner().invoke(app, [*map(str, arguments)])
    assert found.exit_code == 0, found.output

    def settings(stage: str) -> dict[str, object]:
        return json.loads((tmp_path / "out-work" / stage / "manifest.json").read_text())["settings"]

    assert settings("decode").items() >= {"method": "diverse_beam", "num_candidates": 8, "diversity": 1.0}.items()
    assert settings("calibrate").items() >= presets.PRESETS["brio"]["calibrate"].items()
