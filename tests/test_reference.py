"""The remembered reference beside one that runs: a copy of the model, held through the whole training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calibeam import reference, seq2seq
from calibeam.engine import layout
from calibeam.lora import Adapter
from calibeam.paper.regularization import REGULARIZERS, WITHOUT_REFERENCE
from calibeam.reference import Remembered, Running
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, decode, prepare, score
from calibeam.training import Pairs
from conftest import sentence, tiny_model

COUNT = 7
LENGTHS = {"max_source_length": 24, "max_target_length": 10}


def squared(logits: Tensor, reference_logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """A regulariser of a user's own."""
    return ((logits - reference_logits) ** 2).mean(-1).masked_fill(~mask, 0.0).sum(-1)


EVERY = {**{name: name for name in REGULARIZERS if REGULARIZERS[name] not in WITHOUT_REFERENCE}, "own": squared}


def a_config(**settings: Any) -> calibrate.Config:
    return calibrate.Config(**{"data": "", "model": "", "scored": "", "output": "", "reg_weight": 1.0, **LENGTHS, **settings})


def pairs_of(model: Seq2Seq, config: calibrate.Config) -> Pairs:
    texts = ((str(i), sentence(i, 4 + 2 * i), sentence(50 + i, 1 + i)) for i in range(COUNT))
    return Pairs(model, texts, config, by_token=False)


def candidates_of(model: Seq2Seq) -> list[dict[str, Any]]:
    rows = []
    for i in range(COUNT):
        token_ids, _ = model.encode_targets([sentence(100 + 10 * i + k, 1 + k) for k in range(2 + i % 3)], 10)
        rows.append({"token_ids": token_ids, "similarity": [0.5 * k for k in range(len(token_ids))]})
    return rows


def disturbed(model: Any) -> list[Tensor]:
    """What is trained, after a step of some kind."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return trained


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("family", ["t5", "t5-untied", "bart", "pegasus"])
def test_what_is_remembered_is_what_a_copy_finds(
    family: str, name: str, lora: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and every gradient, in float64 but for T5's norms; in batches of other examples than those of the step."""
    monkeypatch.setattr(reference, "BATCH", 3)
    model, copied = (Seq2Seq(tiny_model(family, 0, len(tokenizer)).double(), tokenizer) for _ in range(2))
    config, off = a_config(regularizer=EVERY[name]), None
    if lora:
        adapter = Adapter(model.model.float(), rank=2, alpha=4.0, target_modules=(), seed=0)
        model.model.double()
        off = adapter.off
    pairs, rows = pairs_of(model, config), candidates_of(model)
    remembered = Remembered(model, pairs.sources, pairs.targets, config, *([off] if off else []))
    assert remembered.model is None
    trained = disturbed(model.model)
    places = [5, 0, 3, 6]
    given = [[pairs.sources[i] for i in places], [pairs.targets[i] for i in places], [rows[i] for i in places], places, places]
    found = []
    for frozen in (remembered, Running(copied)):
        step = calibrate.CalibrationStep(model, frozen, config)
        figures = step.loss(step.batch(*given))
        assert figures["regularization"].abs() > 1e-3
        found.append((figures, torch.autograd.grad(figures["loss"], trained, allow_unused=True)))
    (ours, gradients), (theirs, expected) = found
    tolerance = 1e-4 if family.startswith("t5") else 1e-9
    for figure in ours:
        assert ours[figure].item() == pytest.approx(theirs[figure].item(), rel=tolerance)
    for left, right in zip(gradients, expected, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.allclose(left, right, rtol=tolerance, atol=tolerance)


def test_it_pays_where_training_comes_to_every_target_and_there_is_room(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, unknown = (Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer) for family in ("pegasus", "m2m_100"))
    pairs = pairs_of(model, a_config())
    assert reference.pays(model, pairs.targets, a_config(), COUNT)
    assert not reference.pays(model, pairs.targets, a_config(), COUNT - 1)
    assert not reference.pays(unknown, pairs.targets, a_config(), COUNT)
    size = sum(map(len, pairs.targets)) * model.model.config.d_model * 4
    for memory, expected in ((4 * size, True), (4 * size - 1, False)):
        monkeypatch.setattr(reference.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.__getitem__)
        assert reference.pays(model, pairs.targets, a_config(), COUNT) == expected


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
def test_calibrate_finds_the_same_either_way(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": str(i), "source": sentence(i, 8), "target": sentence(i, 3)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict.fromkeys(("train", "validation", "test"), str(tmp_path / "rows.jsonl"))
    data = str(prepare.run(prepare.Config(output=str(tmp_path / "data"), **files)))
    seq2seq.save(Seq2Seq(tiny_model("bart", 0, len(tokenizer)), tokenizer), tmp_path / "model")
    given = {"data": data, "model": str(tmp_path / "model")}
    search = {"num_candidates": 3, "max_new_tokens": 8, "max_source_length": 24}
    candidates = str(decode.run(decode.Config(**given, output=str(tmp_path / "decode"), **search)))
    given["scored"] = str(score.run(score.Config(**given, candidates=candidates, output=str(tmp_path / "score"))))
    more = {"num_train_epochs": 2.0, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3, "reg_weight": 1.0}
    loaded, logs = list[str](), list[list[dict[str, Any]]]()
    load = seq2seq.load
    monkeypatch.setattr(seq2seq, "load", lambda *args, **named: loaded.append("") or load(*args, **named))
    for name in ("remembered", "running"):
        if name == "running":
            monkeypatch.setattr(reference, "pays", lambda *_: False)
        config = calibrate.Config(**given, output=str(tmp_path / name), select="perplexity", **more, **settings, **LENGTHS)
        lines = (calibrate.run(config) / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line)["train"] for line in lines if '"train"' in line])
    assert len(logs[0]) == len(logs[1]) == 4
    assert logs[0][-1]["regularization"] > 0
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert len(loaded) == (2 if settings else 3)  # a copy of the model is loaded where it runs, and only there


def test_none_is_made_where_nothing_reads_it(tokenizer: Any) -> None:
    model = Seq2Seq(copy.deepcopy(tiny_model("t5", 0, len(tokenizer))), tokenizer)
    config = a_config(regularizer="cross_entropy")
    pairs, rows = pairs_of(model, config), candidates_of(model)
    step = calibrate.CalibrationStep(model, None, config)
    batch = step.batch([*pairs.sources], [*pairs.targets], rows, range(COUNT))
    assert not {"remembered", "target", "target_plan"} & batch.keys()
    assert step.loss(batch)["regularization"] > 0


@pytest.mark.parametrize("frozen", ["remembered", "running"])
@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_sources_that_share_rows_change_neither_loss_nor_gradient(
    family: str, frozen: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step of calibration, the target of every source beside its candidates, in float64 but for T5's norms."""
    model, copied = (Seq2Seq(tiny_model(family, 0, len(tokenizer)).double(), tokenizer) for _ in range(2))
    config = a_config()
    pairs, rows = pairs_of(model, config), candidates_of(model)
    given = [*pairs.sources], [*pairs.targets], rows, range(COUNT), range(COUNT)
    reads = Remembered(model, pairs.sources, pairs.targets, config) if frozen == "remembered" else Running(copied)
    trained, found = disturbed(model.model), []
    monkeypatch.setattr(layout, "_work", lambda rows, length, nodes, size: rows * (length + nodes))  # attention costs nothing
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(layout, "share", lambda *_: None)
        step = calibrate.CalibrationStep(model, reads, config)
        batch = step.batch(*given)
        assert (len(batch["input_ids"]) < COUNT) == ("row" in batch) == shared
        figures = step.loss(batch)
        assert figures["regularization"] > 1e-3
        found.append((figures, torch.autograd.grad(figures["loss"], trained, allow_unused=True)))
    (ours, gradients), (theirs, expected) = found
    tolerance = 1e-4 if family == "t5" else 1e-9
    for figure in ours:
        assert ours[figure].item() == pytest.approx(theirs[figure].item(), rel=tolerance)
    for left, right in zip(gradients, expected, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.allclose(left, right, rtol=tolerance, atol=tolerance)
