"""LoRA in calibration, beside peft in Hugging Face's own forward pass and beside low-rank factors written out."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForSeq2SeqLM

import calibeam
from calibeam import seq2seq, store
from calibeam.lora import Adapter
from calibeam.paper.calibration import CALIBRATION_LOSSES
from calibeam.paper.likelihood import sequence_log_p, token_log_p
from calibeam.paper.regularization import REGULARIZERS
from calibeam.records import CalibeamError
from calibeam.reference import Running
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, decode, evaluate, export, finetune, prepare, score
from conftest import sentence, tiny_model

LENGTHS = {"max_source_length": 24, "max_target_length": 10}
KNOWN = ["t5", "bart", "pegasus"]
QUERIES = {"t5": "q", "bart": "q_proj", "pegasus": "q_proj", "umt5": "q", "m2m_100": "q_proj"}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], dict[str, str]]:
    """What calibrate reads, made once for each family: data, a model that knows its rows a little, and scored candidates."""
    made: dict[str, dict[str, str]] = {}

    def make(family: str) -> dict[str, str]:
        if family not in made:
            work = tmp_path_factory.mktemp(family)
            for name, first, count in (("train", 0, 8), ("validation", 4, 4), ("test", 100, 3)):
                sources = [sentence(i, 8 + i % 5) for i in range(first, first + count)]
                rows = [{"id": s, "source": s, "target": " ".join(s.split()[:4])} for s in sources]
                (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            files = {name: str(work / f"{name}.jsonl") for name in ("train", "validation", "test")}
            data = {"data": str(prepare.run(prepare.Config(output=str(work / "data"), **files)))}
            seq2seq.save(Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer), work / "start")
            settings = {"learning_rate": 1e-2, "batch_size": 8, "max_steps": 40, "eval_steps": 40, **LENGTHS}
            tuned = finetune.Config(**data, model=str(work / "start"), output=str(work / "tuned"), **settings)
            model = {**data, "model": str(finetune.run(tuned))}
            search = {"num_candidates": 4, "max_new_tokens": 8, "max_source_length": 24}
            found = decode.run(decode.Config(**model, output=str(work / "decode"), **search))
            scored = score.run(score.Config(**model, candidates=str(found), output=str(work / "score")))
            made[family] = {**model, "scored": str(scored)}
        return made[family]

    return make


def calibrated(places: dict[str, str], output: Path, **settings: Any) -> Path:
    """By default with so much cross-entropy on rows of the validation split that the last step is the one kept."""
    given = {
        "loss": "list_rank", "beta": 1.0, "learning_rate": 1e-2, "regularizer": "cross_entropy", "reg_weight": 10.0,
        "batch_size": 8, "max_steps": 3, "eval_steps": 3, "select": "perplexity", "lora_rank": 2, **LENGTHS,
    }  # fmt: skip
    return calibrate.run(calibrate.Config(**places, output=str(output), **{**given, **settings}))


def log(folder: Path, kind: str) -> dict[int, dict[str, float]]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {record["step"]: record[kind] for record in records if kind in record}


def weights(folder: Path | str) -> dict[str, Tensor]:
    return load_file(seq2seq.locate(folder) / "model.safetensors")


def plain(folder: Path | str) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(seq2seq.locate(folder)).eval()


def a_config(**settings: Any) -> calibrate.Config:
    return calibrate.Config(**{"data": "", "model": "", "scored": "", "output": "", **LENGTHS, **settings})


def an_adapter(model: Any, *targets: str, rank: int = 2, alpha: float = 3.0, seed: int = 0) -> Adapter:
    return Adapter(model, rank=rank, alpha=alpha, target_modules=targets, seed=seed)


def fill(model: Any, scale: float = 0.3) -> None:
    """As if the adapter had been trained."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def a_batch(model: Seq2Seq) -> tuple[Any, ...]:
    sources, _ = model.encode_sources([sentence(i, 4 + i) for i in range(4)], 24)
    targets, _ = model.encode_targets([sentence(50 + i, 1 + i) for i in range(4)], 10)
    rows = []
    for i in range(4):
        token_ids, _ = model.encode_targets([sentence(100 + 10 * i + k, 1 + k) for k in range(3)], 10)
        rows.append({"token_ids": token_ids, "similarity": [0.5, 2.0, 1.0], "log_p": [0.0] * 3})
    return sources, targets, rows


def hugging_face_loss(current: Callable[..., Tensor], reference: Callable[..., Tensor], batch: tuple[Any, ...]) -> Tensor:
    """list_rank with beta 1 plus KL, summed over the examples; a function gives logits of input ids and labels."""
    total: Any = 0.0
    for source, target, row in zip(*batch, strict=True):
        labels, mask = seq2seq.pad_rows(row["token_ids"], 0)
        log_p = sequence_log_p(token_log_p(current(torch.tensor([source] * len(labels)), labels), labels), mask)[None]
        similarity = torch.tensor([row["similarity"]])
        total = total + CALIBRATION_LOSSES["list_rank"](log_p, similarity, torch.ones_like(log_p, dtype=torch.bool), 1.0).sum()
        ids = (torch.tensor([source]), torch.tensor([target]))
        with torch.no_grad():
            theirs = reference(*ids)
        total = total + REGULARIZERS["kl"](current(*ids), theirs, ids[1], ids[1] >= 0).sum()
    return total


# What is trained


@pytest.mark.parametrize("family", KNOWN)
def test_the_divergence_begins_at_0(family: str, places: Any, tmp_path: Path) -> None:
    steps = log(calibrated(places(family), tmp_path / "out", regularizer="kl"), "train")
    assert steps[1]["regularization"] == pytest.approx(0.0, abs=1e-5)
    assert steps[2]["regularization"] > 0.0
    assert steps[3]["regularization"] > 0.0


@pytest.mark.parametrize("family", KNOWN)
def test_only_the_adapter_trains(family: str, places: Any, tmp_path: Path) -> None:
    folder = calibrated(places(family), tmp_path / "out", lora_save="adapter")
    before, after = weights(places(family)["model"]), weights(folder)
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    adapted = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in adapter if "lora_A" in name}
    assert len(adapted) * 2 == len(adapter) > 20
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = (after[name] - weight).double()
        if name.removesuffix(".weight") in adapted:
            assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2
        else:
            assert not change.any(), name


@pytest.mark.parametrize("family", [*KNOWN, "umt5", "m2m_100"])
@pytest.mark.parametrize("regularizer", ["kl", "kl_target_token"])
def test_the_reference_is_the_model_without_the_adapter(family: str, regularizer: str, tokenizer: Any) -> None:
    """Exactly 0 before the first step, and afterwards what a copy of the model gives. The families the engine does
    not know take Hugging Face's forward pass."""
    model, copied = (Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer) for _ in range(2))
    config, adapter = a_config(regularizer=regularizer, reg_weight=1.0, pairs="all"), an_adapter(model.model)
    step = calibrate.CalibrationStep(model, Running(model, adapter.off), config)
    beside_a_copy = calibrate.CalibrationStep(model, Running(copied), config)
    sources, targets, rows = a_batch(model)
    batch = step.batch(sources, targets, rows, range(len(rows)))
    assert step.loss(batch)["regularization"].item() == pytest.approx(0.0, abs=1e-5)
    fill(model.model, 1.0)
    trained = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    ours, theirs = step.loss(batch), beside_a_copy.loss(batch)
    assert ours["regularization"].abs() > 1e-3
    assert {name: value.item() for name, value in ours.items()} == {name: value.item() for name, value in theirs.items()}
    for left, right in zip(*(torch.autograd.grad(each["loss"], trained) for each in (ours, theirs)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("family", [*KNOWN, "m2m_100"])
@pytest.mark.parametrize("targets", ["queries", "all"])
def test_gradients_are_those_of_peft_in_hugging_faces_forward_pass(family: str, targets: str, tokenizer: Any) -> None:
    """In float64; T5 normalises in float32 whatever it is given."""
    model = Seq2Seq(tiny_model(family, 0, len(tokenizer)).double(), tokenizer)
    reference = tiny_model(family, 0, len(tokenizer)).double()
    adapter = an_adapter(model.model.float(), *([QUERIES[family]] if targets == "queries" else []))
    model.model.double()
    fill(model.model)
    step = calibrate.CalibrationStep(
        model, Running(model, adapter.off), a_config(loss="list_rank", beta=1.0, regularizer="kl", reg_weight=1.0)
    )
    batch, trained = a_batch(model), {n: p for n, p in model.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    ours = step.loss(step.batch(*batch, range(len(batch[-1]))))["loss"]
    theirs = hugging_face_loss(
        lambda ids, labels: model.model(input_ids=ids, labels=labels).logits,
        lambda ids, labels: reference(input_ids=ids, labels=labels).logits,
        batch,
    )
    tolerance = 1e-3 if family == "t5" else 1e-9
    assert torch.allclose(ours, theirs, rtol=tolerance)
    found, expected = (torch.autograd.grad(loss, [*trained.values()]) for loss in (ours, theirs))
    for name, left, right in zip(trained, found, expected, strict=True):
        assert torch.allclose(left, right, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("family", KNOWN)
def test_training_is_that_of_low_rank_factors_written_out(family: str, places: Any, tmp_path: Path) -> None:
    """W + alpha / rank B A put into the model by hand, the loss from all logits, and AdamW: no peft, no engine."""
    settings = {"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": (QUERIES[family],), "seed": 5}
    folder = calibrated(places(family), tmp_path / "out", regularizer="kl", reg_weight=1.0, **settings)
    model = seq2seq.load(seq2seq.locate(places(family)["model"]), device="cpu")
    weight, beside = dict(model.model.named_parameters()), plain(places(family)["model"])
    an_adapter(beside, QUERIES[family], rank=3, seed=5)
    drawn = {name.replace(".lora_A.default", ""): a for name, a in beside.named_parameters() if "lora_A" in name}
    factors = {name: (a, torch.zeros(len(weight[name]), 3, requires_grad=True)) for name, a in drawn.items()}
    model.model.requires_grad_(False)
    scored = store.read(places(family)["scored"], "score").rows("scored", store.SCORED)
    examples = {e.id: e for e in store.read(places(family)["data"], "prepare").examples("train")}
    sources, _ = model.encode_sources([examples[row["id"]].source for row in scored], 24)
    targets, _ = model.encode_targets([examples[row["id"]].targets[0] for row in scored], 10)

    def logits(changed: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        return functional_call(model.model, changed, kwargs={"input_ids": ids, "labels": labels}).logits

    trained = [factor for pair in factors.values() for factor in pair]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for figures in log(folder, "train").values():
        changed = {name: weight[name] + 6.0 / 3 * (b @ a) for name, (a, b) in factors.items()}
        loss = hugging_face_loss(partial(logits, changed), partial(logits, {}), (sources, targets, scored)) / len(scored)
        assert figures["loss"] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    assert all(b.abs().sum() > 0 for _, b in factors.values())


# What is decoded and saved


@pytest.mark.parametrize("family", KNOWN)
def test_the_weights_are_the_same_bits_after_merging(family: str) -> None:
    model = tiny_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapter = an_adapter(model)
    fill(model)
    names = [*model.state_dict()]
    with adapter.merged():
        assert model.state_dict().keys() == before.keys()
        assert not all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [*model.state_dict()] == names
    after = {n.replace(".base_layer", ""): weight for n, weight in model.state_dict().items() if "lora_" not in n}
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())
    assert after.keys() == before.keys()


@pytest.mark.parametrize("family", KNOWN)
def test_the_merged_checkpoint_decodes_as_model_and_adapter_do(
    family: str, places: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = calibrated(places(family), tmp_path / "out", lora_save="adapter", max_steps=6, eval_steps=6)
    merged, base = plain(folder / "model"), plain(places(family)["model"])
    adapted = peft.PeftModel.from_pretrained(plain(places(family)["model"]), folder / "adapter").eval()
    ids = torch.randint(3, 200, (3, 9), generator=torch.Generator().manual_seed(0))
    source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    search = {"num_candidates": 4, "max_new_tokens": 8}
    with caplog.at_level(logging.WARNING, "calibeam"):
        found = calibeam.decode(merged, **source, **search)
        assert "forward pass" not in caplog.text
        beside = calibeam.decode(adapted, **source, **search)
        assert "does not know adapters that are not merged" in caplog.text
    assert torch.equal(found.token_ids, beside.token_ids)
    assert torch.allclose(found.log_p, beside.log_p, atol=1e-4)
    assert not torch.allclose(found.log_p, calibeam.decode(base, **source, **search).log_p, atol=1e-2)
    beams = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0, "early_stopping": False, "max_new_tokens": 8}
    written = adapted.generate(**source, **beams)[:, 1:].view(3, 4, -1)
    written = written.masked_fill(~seq2seq.sequence_mask(written, (1,)), 0)  # generate pads with the end token here
    assert torch.equal(written, found.token_ids[..., : written.shape[-1]])
    assert torch.allclose(calibeam.sequence_log_p(adapted, **source, token_ids=found.token_ids), found.log_p, atol=1e-4)


@pytest.mark.parametrize("family", ["t5", "pegasus"])  # BART learns too little here for a ROUGE above 0
def test_validation_decodes_with_the_adapter(family: str, places: Any, tmp_path: Path) -> None:
    """What the log says of the best step is what the checkpoint then gives."""
    folder = calibrated(places(family), tmp_path / "out", learning_rate=3e-2, max_steps=6, eval_steps=6, select="rouge")
    seen = log(folder, "validation")
    manifest = json.loads((folder / store.MANIFEST).read_text())
    assert seen[0]["rouge"] != seen[6]["rouge"]
    best = manifest["counts"]["best_step"]
    examples = store.read(places(family)["data"], "prepare").examples("validation")
    measured = evaluate.Validation(seq2seq.load(folder / "model", device="cpu"), examples, a_config()).measure("rouge")
    assert measured == pytest.approx(seen[best], rel=1e-5)


def test_the_adapter_is_the_same_bits_again(places: Any, tmp_path: Path) -> None:
    first, again, other = (
        calibrated(places("t5"), tmp_path / name, lora_save="adapter", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    files = {file.name for file in (first / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert all((first / "adapter" / name).read_bytes() == (again / "adapter" / name).read_bytes() for name in files)
    name = "adapter/adapter_model.safetensors"
    assert (first / name).read_bytes() != (other / name).read_bytes()


def test_an_exported_adapter_gives_what_was_evaluated(places: Any, tmp_path: Path) -> None:
    given = places("bart")
    folder = calibrated(given, tmp_path / "calibrate", lora_save="adapter", lora_target_modules=("q_proj", "fc1"))
    settings = {"data": given["data"], "num_candidates": (2,), "max_new_tokens": 8, **LENGTHS}
    before, after = (
        evaluate.run(evaluate.Config(model=str(model), reference=given["model"], output=str(tmp_path / name), **settings))
        for name, model in (("before", given["model"]), ("after", folder))
    )
    places_of = {"calibrated": str(folder), "before": str(before), "after": str(after)}
    exported = export.run(export.Config(**places_of, output=str(tmp_path / "mine")))
    assert {file.name for file in exported.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md", store.MANIFEST
    }  # fmt: skip
    model, tokenizer = plain(given["model"]), seq2seq.load(seq2seq.locate(given["model"]), device="cpu").tokenizer
    model = peft.PeftModel.from_pretrained(model, exported).merge_and_unload()
    rows = store.read(after, "evaluate").rows("outputs", evaluate.OUTPUTS)
    for example, row in zip(store.read(given["data"], "prepare").examples("test"), rows, strict=True):
        source = tokenizer(example.source, truncation=True, max_length=24, return_tensors="pt")
        written = model.generate(**source, num_beams=2, length_penalty=0.0, max_new_tokens=8)[0]
        assert tokenizer.decode(written, skip_special_tokens=True).strip() == row["output"]
    card = (exported / "README.md").read_text()
    loading = card.partition("```python\n")[2].partition("tokenizer = ")[0]
    named: dict[str, str] = {}
    exec(loading, named)
    assert (named["base"], named["place"]) == ("path/to/tuned", exported.name)
    assert "model = PeftModel.from_pretrained(model, place).merge_and_unload()" in card
    assert "generate(**inputs, num_beams=5, length_penalty=0.0, max_new_tokens=8)" in card
    assert "| LoRA | rank 2, alpha 16.0, q_proj, fc1 |" in card
    assert str(tmp_path) not in card + (exported / "adapter_config.json").read_text()
    with pytest.raises(CalibeamError, match="is an adapter, not a model"):
        evaluate.run(evaluate.Config(model=str(exported), output=str(tmp_path / "again"), **settings))


# What is refused


def test_layers_that_the_model_does_not_have_are_refused_with_those_it_has(places: Any, tmp_path: Path) -> None:
    for wrong in ("query", "lm_head", "shared", "rotation.q_proj"):
        with pytest.raises(CalibeamError, match=f"no '{wrong}' to adapt; it has fc1, fc2, k_proj, out_proj, q_proj, v_proj"):
            calibrated(places("bart"), tmp_path / "out", lora_target_modules=("q_proj", wrong))
    assert not (tmp_path / "out").exists()


def test_an_end_of_a_name_is_enough(tokenizer: Any) -> None:
    model = tiny_model("bart")
    an_adapter(model, "decoder.layers.1.encoder_attn.v_proj")
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == [
        f"model.decoder.layers.1.encoder_attn.v_proj.lora_{part}.default.weight" for part in "AB"
    ]


@pytest.mark.parametrize(
    "settings",
    [{"lora_alpha": 8.0}, {"lora_target_modules": ("q",)}, {"lora_save": "adapter"}],
    ids=lambda each: next(iter(each)),
)
def test_settings_of_an_adapter_without_one_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CalibeamError, match=f"^{next(iter(settings))} .* lora_rank is 0"):
        a_config(**settings)
    a_config(lora_rank=1, **settings)


def test_the_settings_are_part_of_the_stages_identity(places: Any, tmp_path: Path) -> None:
    folder = calibrated(places("t5"), tmp_path / "out")
    written = (folder / store.MANIFEST).read_bytes()
    assert calibrated(places("t5"), tmp_path / "out") == folder
    assert (folder / store.MANIFEST).read_bytes() == written
    for change in ({"lora_rank": 1}, {"lora_alpha": 1.0}, {"lora_target_modules": ("q",)}, {"lora_save": "adapter"}):
        with pytest.raises(CalibeamError, match=f"made with other settings or inputs:\n  settings.{next(iter(change))}: "):
            calibrated(places("t5"), tmp_path / "out", **change)


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CalibeamError, match=r"pip install 'calibeam\[lora\]'"):
        a_config(lora_rank=1)
    a_config()


# peft's models in the Python API


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("state", ["on", "off", "merged", "on the head"])
def test_a_search_with_a_peft_model_is_the_one_of_its_own_forward_pass(family: str, state: str) -> None:
    settings = {"target_modules": ["lm_head"] if state == "on the head" else "all-linear", "init_lora_weights": False}
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(family), peft.LoraConfig(r=2, task_type="SEQ_2_SEQ_LM", **settings)).eval()
    if state == "merged":
        model.merge_adapter()
    if state == "off":
        model.disable_adapter_layers()
    ids = torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(0))
    source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = calibeam.decode(model, **source, num_candidates=3, max_new_tokens=5)
    for number, place in itertools.product(range(2), range(3)):
        row = found.token_ids[number, place]
        kept = seq2seq.sequence_mask(row, seq2seq.special_ids(model).eos)
        with torch.no_grad():
            logits = model(input_ids=ids[number : number + 1], labels=row[None]).logits
        assert sequence_log_p(token_log_p(logits, row[None]), kept[None]).item() == pytest.approx(
            found.log_p[number, place].item(), abs=1e-4
        )
    again = calibeam.sequence_log_p(model, **source, token_ids=found.token_ids)
    assert torch.allclose(again, found.log_p, atol=1e-4)


def test_prompts_that_peft_learnt_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(tiny_model("t5"), config)
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(CalibeamError, match="prompts"):
        calibeam.decode(model, ids, ids, num_candidates=2, max_new_tokens=3)
    with pytest.raises(CalibeamError, match="prompts"):
        calibeam.sequence_log_p(model, ids, ids, ids[None])


def test_an_adapter_is_not_shared_out() -> None:
    with pytest.raises(CalibeamError, match="lora_rank trains few weights, which shard_model cannot share out"):
        calibrate.Config(output="x", data="x", scored="x", model="x", lora_rank=2, shard_model=True)
