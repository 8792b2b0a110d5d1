"""`calibeam plan`, by hand arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calibeam import forecast
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
        "decode": {"max_new_tokens": 64},
        "score": {"max_target_length": 64},
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


def test_a_billion_sources_on_1024_gpus_by_hand() -> None:
    one, many = by_stage(tables(), sources=10**9), by_stage(tables(), sources=10**9, gpus=1024, price=2.0)
    decode = many["decode"]
    assert decode.shards == many["score"].shards == math.ceil(10**9 / 1024) == 976_563
    stored = 10**9 * 15 * 64 * 2.9
    prepared = (10**9 + 2000) * 4 * (512 + 64) * 0.51
    assert decode.storage == pytest.approx(stored)
    assert decode.seconds_alone == pytest.approx((stored + prepared) / 1e9)
    working = 15e9 / 3462 / 1024
    assert decode.seconds == pytest.approx(working + decode.seconds_alone)
    assert decode.gpu_hours == pytest.approx(1024 * decode.seconds / 3600)
    assert decode.money == pytest.approx(2 * decode.gpu_hours)
    assert one["decode"].seconds - one["decode"].seconds_alone == pytest.approx(1024 * working)
    assert one["decode"].money is None
    assert many["calibrate"].gpus == 256  # the batch has no more examples
    assert "no more than 256 GPUs have work" in many["calibrate"].limit
    assert "one process holds" in many["calibrate"].limit
    assert many["prepare"].seconds > 4 * 24 * 3600  # rows are read by one process: the bottleneck
    assert max(many.values(), key=lambda each: each.seconds).stage == "prepare"


def test_memory_of_decoding_is_near_what_was_measured() -> None:
    """64 sources of PEGASUS LARGE held 8.0 GiB: weights in two bytes, keys and values of 512 + 15 x 64 positions, logits."""
    settings = {"max_new_tokens": 64, "batch_size": 64}
    found = by_stage(tables(decode=settings), sources=1000)["decode"].gpu_memory
    keys_and_values = 64 * 2 * 2 * LAYERS * D * (512 + 15 * 64)
    weights = 2 * (ENCODER + DECODER + VOCABULARY * D)
    assert found == pytest.approx(weights + keys_and_values + 64 * 15 * 8 * VOCABULARY, rel=0.01)
    assert found == pytest.approx(8.0 * 2**30, rel=0.1)


def test_memory_of_training_is_near_what_was_measured() -> None:
    """25 GiB of pretraining, 15.7 of a step of 16 sources with 15 candidates."""
    pretraining = {"files": ["text.jsonl"], "max_steps": 10, "batch_size": 128, "micro_batch_size": 32, "max_target_length": 128,
                   "optimizer": "adamw"}  # fmt: skip
    more = {**tables()["calibrate"], "micro_batch_size": 16}
    found = by_stage(tables(pretrain=pretraining, calibrate=more), sources=1000)
    assert found["pretrain"].gpu_memory == pytest.approx(25 * 2**30, rel=0.1)
    assert found["calibrate"].gpu_memory == pytest.approx(15.7 * 2**30, rel=0.1)


def test_a_model_that_does_not_fit_is_told() -> None:
    big = {"size": "2b", "vocab_size": VOCABULARY}
    found = by_stage(tables(create=big, finetune={"micro_batch_size": 512}), sources=1000, gpu="a100")
    assert "do not fit in a GPU of 80.0 GB" in found["finetune"].limit
    assert found["decode"].limit == ""


def test_prepared_data_are_counted(rows_file: Callable[..., Path], model_folder: Callable[..., Path], tmp_path: Path) -> None:
    files = {"train": str(rows_file("train.jsonl", 30)), "validation": str(rows_file("validation.jsonl", 6, first=100))}
    recipe = {"output": str(tmp_path / "out"), "model": str(model_folder()), "prepare": files}
    with pytest.raises(CalibeamError, match="how many sources"):
        forecast.forecast(recipe)
    prepare.run(prepare.Config(output=str(tmp_path / "out/prepare"), **files))
    found = by_stage(recipe, gpu="cpu")
    assert found["decode"].shards == 1
    assert found["prepare"].storage < 10_000
    assert by_stage(recipe, gpu="cpu", sources=3000)["decode"].flops == pytest.approx(100 * found["decode"].flops)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        'output = "out"\n[prepare]\ntrain = "a"\nvalidation = "b"\n[create]\nsize = "2b"\nvocab_size = 96103\n'
        "[finetune]\nnum_train_epochs = 1\n"
    )
    command = ["plan", str(file), "--gpus", "1024", "--gpu", "h200", "--sources", "1e9", "--price", "3"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    assert "The bottleneck is prepare" in " ".join(shown.output.split())
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert [each["stage"] for each in found][:3] == ["prepare", "finetune", "decode"]
    assert {"seconds", "gpu_memory", "storage", "money", "limit"} <= found[0].keys()
    assert isinstance(CliRunner().invoke(app, [*command[:2], "--gpu", "abacus", "--sources", "9"]).exception, CalibeamError)
    unknown = ["plan", str(file), "model=no/such-model", "--sources", "9"]
    file.write_text('output = "out"\nmodel = "x"\n[prepare]\ntrain = "a"\nvalidation = "b"\n')
    assert "cannot be read" in str(CliRunner().invoke(app, unknown).exception)
