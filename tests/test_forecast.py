"""`calibeam plan`, by hand arithmetic."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import calibeam
from calibeam import display, forecast
from calibeam.cli import app
from calibeam.records import CalibeamError
from calibeam.stages import prepare

# PEGASUS LARGE: 16 + 16 layers, d = 1024, ffn 4096. Projections have biases, a norm has 2 d.
D, FFN, LAYERS, VOCABULARY = 1024, 4096, 16, 96_103
ATTENTION, FEED_FORWARD, NORM = 4 * (D * D + D), 2 * D * FFN + D + FFN, 2 * D
ENCODER = LAYERS * (ATTENTION + FEED_FORWARD + 2 * NORM) + NORM
DECODER = LAYERS * (2 * ATTENTION + FEED_FORWARD + 3 * NORM) + NORM


def once(source: int, target: int, candidates: int) -> float:
    """The paper's appendix: C_enc n_enc + C_dec n_dec m."""
    encoder = 2 * ENCODER + 2 * LAYERS * source * D
    decoder = 2 * DECODER + LAYERS * target * D
    return encoder * source + decoder * target * candidates


def tables(**more: Any) -> dict[str, Any]:
    """LARGE, sources of 512 tokens, outputs of 64, on rows that nobody has seen."""
    return {
        "output": "out/large",
        "prepare": {"train": "train.jsonl", "validation": "validation.jsonl", "max_validation": 1000, "max_test": 1000},
        "create": {"size": "large", "vocab_size": VOCABULARY},
        "decode": {"max_new_tokens": 64, "engine": "ray"},
        "score": {"max_target_length": 64, "engine": "ray"},
        "calibrate": {"max_target_length": 64, "loss": "list_rank", "batch_size": 256, "select_examples": 1},
        **more,
    }


def by_stage(*given: Any, **named: Any) -> dict[str, forecast.Forecast]:
    return {each.stage: each for each in forecast.forecast(*given, **named)}


def test_what_was_measured_is_predicted() -> None:
    """3,462 candidates per second, 283 and 136 examples: the README's own figures come back for the README's own case."""
    found = by_stage(tables(), sources=1_000_000)
    work = {name: each.seconds - each.seconds_alone for name, each in found.items()}
    assert work["decode"] == pytest.approx(15e6 / 3462)
    assert work["score"] == pytest.approx(1e6 / 283)
    assert work["calibrate"] == pytest.approx(1e6 / 136, rel=1e-3)  # a validation of one example every now and then
    assert found["decode"].flops == pytest.approx(1e6 * once(512, 64, 15))


def test_several_learning_rates_are_several_calibrations() -> None:
    """And as many models as there are, and the best one once more."""
    more = {**tables()["calibrate"], "learning_rate": [1e-6, 1e-5, 1e-4]}
    one, three = (by_stage(each, sources=10_000)["calibrate"] for each in (tables(), tables(calibrate=more)))
    assert three.flops == pytest.approx(3 * one.flops)
    assert three.storage == 4 * one.storage


def test_a_small_model_is_slower_than_its_flops_and_one_between_lies_between() -> None:
    """14,731 dialogues of SAMSum in 28.4 seconds, five of them to begin."""

    def decoding(size: str) -> float:
        settings = {"max_source_length": 126, "max_new_tokens": 27}
        found = by_stage(tables(create={"size": size, "vocab_size": VOCABULARY}, decode=settings), sources=14_731)["decode"]
        return (found.seconds - found.seconds_alone) / found.flops

    small, base, large = (decoding(size) for size in ("small", "base", "large"))
    flops = 14_731 * forecast._size_named("small").flops(126, 27, 15)
    assert small * flops == pytest.approx(28.4 - 5, rel=0.02)
    assert small > base > large
    assert decoding("2b") == large


def test_a_billion_sources_on_1024_gpus_by_hand() -> None:
    one, many = by_stage(tables(), sources=10**9), by_stage(tables(), sources=10**9, gpus=1024, price=2.0)
    decode = many["decode"]
    assert decode.shards == many["score"].shards == math.ceil(10**9 / 1024) == 976_563
    stored = 10**9 * 15 * 64 * 2.9
    prepared = (10**9 + 2000) * 4 * (512 + 64) * 0.51
    assert decode.storage == pytest.approx(stored)
    assert decode.seconds_alone == pytest.approx((stored + prepared) / 1e9 + 5)
    working = 15e9 / 3462 / 1024
    assert decode.seconds == pytest.approx(working + decode.seconds_alone)
    assert decode.gpu_hours == pytest.approx(1024 * decode.seconds / 3600)
    assert decode.money == pytest.approx(2 * decode.gpu_hours)
    assert one["decode"].seconds - one["decode"].seconds_alone == pytest.approx(1024 * working)
    assert one["decode"].money is None
    assert many["calibrate"].gpus == 256 / 8  # micro-batches
    assert "a step is 32 micro-batches, so no more than 32 GPUs have work" in many["calibrate"].limit
    assert many["calibrate"].host_memory == pytest.approx(10**9 * (80 + 15 * 12 + 4.1 * (512 + 16 * 64)))
    assert "one process holds" in many["calibrate"].limit
    assert many["prepare"].seconds == pytest.approx((10**9 + 2000) * 4 * (512 + 64) / 16.1e6 + prepared / 1e9)  # by one process


def test_gpus_that_have_work() -> None:
    """As many as there are shards, or micro-batches."""
    few = {"batch_size": 20, "micro_batch_size": 8}
    evaluated = {"max_examples": 3000, "split": "train"}
    found = by_stage(tables(decode={}, finetune=few, evaluate=evaluated), sources=10**5, gpus=64)
    assert (found["decode"].gpus, found["finetune"].gpus, found["evaluate"].gpus) == (64, 3, 3)
    assert (found["decode"].shards, found["evaluate"].shards) == (98, 3)
    assert found["evaluate"].limit == "there are 3 shards, so no more than 3 GPUs have work"
    assert found["score"].gpus == 64


def test_what_is_decoded_is_what_is_scored_and_calibrated_on() -> None:
    one, other = (by_stage(tables(decode={"max_new_tokens": 64, "split": split}), sources=5000) for split in ("train", "test"))
    for name in ("decode", "score"):
        assert one[name].flops == pytest.approx(5 * other[name].flops)
    assert one["calibrate"].host_memory == pytest.approx(5 * other["calibrate"].host_memory)
    assert one["calibrate"].flops == pytest.approx(5 * other["calibrate"].flops, rel=1e-3)


def test_checkpoints_lie_there_while_a_training_runs_and_take_time() -> None:
    """Two of LARGE, 12 bytes of every weight by AdamW. 10,000 steps are saved ten times, and after two validations in between."""
    weights = ENCODER + DECODER + VOCABULARY * D
    training = {"max_steps": 10_000, "batch_size": 8, "eval_steps": 2500, "save_steps": 1000}
    found = by_stage(tables(finetune=training), sources=1000)["finetune"]
    assert found.storage_meanwhile == pytest.approx(2 * 12 * weights, rel=0.01)
    assert found.seconds_alone == pytest.approx((12 * 12 + 4) * weights / 1e9 + 5, rel=0.01)
    shared = by_stage(tables(finetune={**training, "shard_model": True, "micro_batch_size": 1}), sources=1000, gpus=8)["finetune"]
    assert shared.seconds_alone == pytest.approx((12 * 12 / 8 + 4) * weights / 1e9 + 5, rel=0.01)


def test_what_is_computed_again_takes_time() -> None:
    """Three forward passes become four."""
    training = {"max_steps": 100, "batch_size": 8}
    kinds = (tables(finetune={**training, "gradient_checkpointing": given}) for given in (False, True))
    one, again = (by_stage(each, sources=1000)["finetune"] for each in kinds)
    assert (again.seconds - again.seconds_alone) / (one.seconds - one.seconds_alone) == pytest.approx(4 / 3)


def test_memory_of_an_adapter_by_hand() -> None:
    """Of the model 4 bytes a weight. Rank 8 on every linear layer: attention d to d, four or eight times a layer, and two of the
    feed-forward part. In a validation there are merged layers beside them."""
    rank, weights = 8, ENCODER + DECODER + VOCABULARY * D
    adapter = rank * LAYERS * (12 * 2 * D + 4 * (D + FFN))
    of_adapter = {**tables()["calibrate"], "lora_rank": rank, "micro_batch_size": 1}
    found = by_stage(tables(calibrate=of_adapter), sources=1000)["calibrate"]
    merged = 4 * (ENCODER + DECODER)
    assert merged > 14 * (512 + 16 * 64) * D * LAYERS
    assert found.gpu_memory == pytest.approx(4 * weights + 16 * adapter + merged, rel=0.01)
    assert found.storage_meanwhile == pytest.approx(2 * (4 * weights + 12 * adapter), rel=0.01)
    assert by_stage(tables(), sources=1000)["calibrate"].gpu_memory > 1.5 * found.gpu_memory


def test_memory_of_decoding_is_near_what_was_measured() -> None:
    """64 sources of PEGASUS LARGE held 8.0 GiB: weights in two bytes, keys and values of 512 + 15 x 64 positions, logits."""
    settings = {"max_new_tokens": 64, "batch_size": 64}
    found = by_stage(tables(decode=settings), sources=1000)["decode"].gpu_memory
    keys_and_values = 64 * 2 * 2 * LAYERS * D * (512 + 15 * 64)
    weights = 2 * (ENCODER + DECODER + VOCABULARY * D)
    assert found == pytest.approx(weights + keys_and_values + 64 * 15 * 8 * VOCABULARY, rel=0.01)
    assert found == pytest.approx(8.0 * 2**30, rel=0.1)


def test_memory_of_training_is_near_what_was_measured() -> None:
    """25 GiB of pretraining, 15.7 of a step of 16 sources with 15 candidates whose reference runs. One that is remembered takes
    4 bytes a weight less, and 2 bytes of the host for every number of a target's states."""
    pretraining = {"files": ["text.jsonl"], "max_steps": 10, "batch_size": 128, "micro_batch_size": 32, "max_target_length": 128,
                   "optimizer": "adamw"}  # fmt: skip
    more = {**tables()["calibrate"], "micro_batch_size": 16}
    found = by_stage(tables(pretrain=pretraining, calibrate={**more, "max_steps": 1}), sources=1000)
    assert found["pretrain"].gpu_memory == pytest.approx(25 * 2**30, rel=0.1)
    assert found["calibrate"].gpu_memory == pytest.approx(15.7 * 2**30, rel=0.1)
    remembered = by_stage(tables(calibrate=more), sources=1000)["calibrate"]
    weights = ENCODER + DECODER + VOCABULARY * D
    assert found["calibrate"].gpu_memory - remembered.gpu_memory == pytest.approx(4 * weights, rel=0.01)
    assert remembered.host_memory - found["calibrate"].host_memory == pytest.approx(1000 * 64 * D * 2)


def test_memory_of_a_model_that_is_shared_out_by_hand() -> None:
    """LARGE by AdamW on eight GPUs: 16 bytes of every weight in eight shares, and 4 of its reference. Gradients are computed with
    the embeddings of both, and the gradients of one. A validation holds all weights twice, in 4 and in 2 bytes. Before it is
    shared out, both are there."""
    shared = {**tables()["calibrate"], "shard_model": True, "max_steps": 1}
    weights, embeddings = ENCODER + DECODER + VOCABULARY * D, VOCABULARY * D

    def memory(gpus: int, **more: Any) -> float:
        return by_stage(tables(calibrate={**shared, **more}), sources=1000, gpus=gpus)["calibrate"].gpu_memory

    activations = 8 * (512 + 16 * 64) * D * LAYERS
    assert memory(8, micro_batch_size=8) == pytest.approx(20 * weights / 8 + 14 * activations + 12 * embeddings, rel=0.01)
    again = 14 * activations / (2 * LAYERS) + 6 * activations
    of_pass, of_validation = again + 12 * embeddings, 6 * weights
    assert of_validation > of_pass
    assert memory(8, micro_batch_size=8, gradient_checkpointing=True) == pytest.approx(20 * weights / 8 + of_validation, rel=0.01)
    assert memory(200, micro_batch_size=1) == pytest.approx(8 * weights, rel=0.01)
    assert memory(1) == pytest.approx(20 * weights + 14 * activations, rel=0.01)


def test_a_model_that_does_not_fit_is_told() -> None:
    big = {"size": "2b", "vocab_size": VOCABULARY}
    found = by_stage(tables(create=big, finetune={"micro_batch_size": 512}), sources=1000, gpu="a100")
    assert "do not fit in a GPU of 80.0 GB" in found["finetune"].limit
    assert found["decode"].limit == ""


def test_prepared_data_are_counted(rows_file: Callable[..., Path], model_folder: Callable[..., Path], tmp_path: Path) -> None:
    files = {"train": str(rows_file("train.jsonl", 30)), "validation": str(rows_file("validation.jsonl", 6, first=100))}
    recipe = {"output": str(tmp_path / "out"), "model": str(model_folder()), "prepare": files}
    with pytest.raises(CalibeamError, match=r"how many sources\? Name a task, run prepare first, or pass --sources"):
        forecast.forecast(recipe)
    with pytest.raises(CalibeamError, match=r"The paper has no figures of docstrings: run prepare first, or pass --sources"):
        forecast.forecast({**recipe, "prepare": {"task": "docstrings"}})
    with pytest.raises(CalibeamError, match="score reads what no decode of this recipe makes"):
        forecast.forecast({**recipe, "score": {"candidates": "elsewhere"}}, sources=9)
    prepare.run(prepare.Config(output=str(tmp_path / "out/prepare"), **files))
    found = by_stage(recipe, gpu="cpu")
    assert found["decode"].shards == 1
    assert found["prepare"].storage < 10_000
    assert by_stage(recipe, gpu="cpu", sources=3000)["decode"].flops == pytest.approx(100 * found["decode"].flops)


def test_the_command_prints_what_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "recipe.toml", Path(__file__).parents[1].joinpath("docs/plan.md").read_text()
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    command = ["plan", str(file), "--gpus", "1024", "--gpu", "h200", "--sources", "1e9", "--price", "3"]
    monkeypatch.setattr(display.console, "width", 80)
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "…" not in shown.output
    for heading in ("time", "GPUs", "GPU hours", "cost", "FLOPs", "GPU memory", "host memory", "store", "shards"):
        assert f" {heading} " in shown.output
    monkeypatch.setattr(display.console, "width", 200)
    shown = CliRunner().invoke(app, command)
    assert "The bottleneck is prepare: 66% of the time" in shown.output
    for stage in ("prepare", "finetune", "decode", "score", "calibrate"):
        printed = next(line for line in shown.output.splitlines() if line.startswith(f"  {stage} "))
        documented = next(line for line in page.splitlines() if line.startswith(f"| {stage} | "))
        cells = [cell.strip() for cell in documented.split("|") if cell.strip()]
        assert all(f" {cell} " in printed for cell in cells), (printed, cells)
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert [each["stage"] for each in found][:3] == ["prepare", "finetune", "decode"]
    assert {"seconds", "gpu_memory", "storage", "money", "limit"} <= found[0].keys()
    for wrong in (["--gpu", "abacus", "--sources", "9"], ["--sources", "inf"]):
        assert isinstance(CliRunner().invoke(app, [*command[:2], *wrong]).exception, CalibeamError)


def test_a_model_that_the_hub_does_not_give_is_told_at_once_in_one_line(tmp_path: Path) -> None:
    """By a Hub that nobody reaches."""
    file = tmp_path / "recipe.toml"
    file.write_text('output = "out"\nmodel = "no/such-model"\n[prepare]\ntrain = "a"\nvalidation = "b"\n')
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment = {**os.environ, **hub, "PYTHONPATH": str(Path(calibeam.__file__).parents[1])}
    line = [sys.executable, "-m", "calibeam", "plan", str(file), "--sources", "9"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)  # noqa: S603
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: no/such-model cannot be read, so its size is not known: name a folder, or a [create] table\n")
