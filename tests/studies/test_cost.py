from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from calibeam import forecast, pipeline
from calibeam.stages import prepare
from calibeam.studies import cost
from studies.test_plan import of, rows

Make = Callable[..., Path]


def test_the_size_of_a_model_by_hand(model_folder: Make) -> None:
    """T5 of 2 + 2 layers, d = 32, d_ff = 64, without biases: attention 4 d d, feed-forward 2 d d_ff, a norm of d before each
    part and one at the end. The relative positions are embeddings."""
    attention, feed_forward = 4 * 32 * 32, 2 * 32 * 64
    size = cost.size_at(str(model_folder("t5")))
    assert size is not None
    assert size.encoder_parameters == 2 * (attention + feed_forward + 2 * 32) + 32
    assert size.decoder_parameters == 2 * (2 * attention + feed_forward + 3 * 32) + 32
    assert (size.encoder_layers, size.decoder_layers, size.attention_size) == (2, 2, 4 * 8)
    assert size.flops(10, 5, 3) == (2 * size.encoder_parameters + 2 * 2 * 10 * 32) * 10 + (
        2 * size.decoder_parameters + 2 * 5 * 32
    ) * 5 * 3  # fmt: skip


@pytest.mark.parametrize("family", ["bart", "pegasus", "marian", "mbart"])
def test_every_family_has_a_size(family: str, model_folder: Make) -> None:
    size = cost.size_at(str(model_folder(family)))
    assert size is not None
    assert size.decoder_parameters > size.encoder_parameters > 0
    assert (size.encoder_layers, size.decoder_layers, size.attention_size) == (2, 2, 32)


def test_flops_of_a_published_task_before_anything_is_prepared(model_folder: Make) -> None:
    """SAMSum has 14,732 training examples of 97.23 and 21.00 words, 1.3 tokens each: nothing of it is cut."""
    calibrated = rows("final", f"model={model_folder('t5')}")[1].points[0].measured
    decode = next(step for step in cost.in_line(calibrated) if step.stage == "decode")
    size = cost.size_of(decode)
    assert size is not None
    assert cost.flops(decode) == pytest.approx(14_732 * size.flops(1.3 * 97.23, 1.3 * 21.00, 15))
    assert of(calibrated, "calibrate").num_train_epochs == 1
    assert all(cost.flops(step) is not None for step in cost.in_line(calibrated))


def test_every_reference_is_trained_on_and_scored_once(model_folder: Make, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    row = {"source": "x" * 40, "target": ["y" * 20] * 5}
    rows_file.write_text("".join(json.dumps({"id": i, **row}) + "\n" for i in range(4)))
    files = {split: str(rows_file) for split in ("train", "validation", "test")}
    tables = {"output": str(tmp_path / "out"), "model": str(model_folder("t5")), "prepare": files, "finetune": {}}
    steps = {step.stage: step for step in forecast.linked(pipeline.plan(tables))}
    prepare.run(steps["prepare"].config)
    size, data = cost.size_of(steps["decode"]), cost.data_of(steps["prepare"])
    assert size is not None
    assert data == cost.Data(dict.fromkeys(files, 4), 10, 5, 5)
    epochs = steps["finetune"].config.num_train_epochs
    assert cost.seen(steps["finetune"], data) == epochs * 20
    assert cost.flops(steps["finetune"]) == pytest.approx(3 * epochs * 20 * size.flops(10, 5, 1))
    assert cost.flops(steps["score"]) == pytest.approx(4 * size.flops(10, 5, 15 + 5))


def test_what_nobody_knows_is_not_guessed() -> None:
    step = rows("final", "model=no/such-model-anywhere")[0].points[0].measured
    assert cost.flops(step) is None
    assert cost.seconds([step]) == {}
