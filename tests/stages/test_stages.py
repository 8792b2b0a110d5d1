"""Every stage, run for real on real files and tiny models."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score import rouge_scorer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import calibeam
from calibeam import functions, seq2seq, shards, store
from calibeam.bertscore import BertScore
from calibeam.paper import official
from calibeam.paper.calibration import CALIBRATION_LOSSES
from calibeam.paper.regularization import REGULARIZERS
from calibeam.paper.similarity import span_similarity
from calibeam.records import CalibeamError, Outputs
from calibeam.reference import Running
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, create, decode, evaluate, finetune, prepare, report, score
from conftest import sentence, tiny_encoder, tiny_model

ROUGE = ("rouge1", "rouge2", "rougeLsum")
LENGTHS = {"max_source_length": 24, "max_target_length": 10}
SEARCH = {"num_candidates": 4, "max_new_tokens": 8, "max_source_length": 24}
Make = Callable[..., Path]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made_up_rows(first: int, count: int, **other: Any) -> list[dict[str, Any]]:
    """Two references each: the first words of the source, and its last."""
    sources = [sentence(i, 8 + i % 5) for i in range(first, first + count)]
    targets = [[" ".join(words[:4]), " ".join(words[-3:])] for words in map(str.split, sources)]
    return [{"source": s, "target": t, "id": f"row-{first + i}", **other}
            for i, (s, t) in enumerate(zip(sources, targets, strict=True))]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def data(work: Path) -> str:
    files = {name: write_rows(work / f"{name}.jsonl", made_up_rows(first, count))
             for name, first, count in (("train", 0, 16), ("validation", 100, 4), ("test", 8, 6))}  # fmt: skip
    return str(prepare.run(prepare.Config(output=str(work / "data"), **files)))


@pytest.fixture(scope="module")
def tuned(work: Path, data: str, tokenizer: Any) -> str:
    """A model that has learnt its rows, the test rows among them, well enough for figures other than 0."""
    start = work / "start"
    seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), start)
    settings = {"learning_rate": 2e-2, "batch_size": 16, "micro_batch_size": 16, "max_steps": 90, "eval_steps": 90}
    return str(finetune.run(finetune.Config(data=data, model=str(start), output=str(work / "tuned"), **LENGTHS, **settings)))


@pytest.fixture(scope="module")
def encoder(work: Path) -> str:
    return str(tiny_encoder("bert", work / "encoder"))


@pytest.fixture(scope="module")
def candidates(work: Path, data: str, tuned: str) -> str:
    return str(decode.run(decode.Config(data=data, model=tuned, output=str(work / "decode"), **SEARCH)))


@pytest.fixture(scope="module")
def scored(work: Path, data: str, tuned: str, candidates: str) -> str:
    return str(score.run(score.Config(data=data, model=tuned, candidates=candidates, output=str(work / "score"))))


def decoded(folder: str | Path) -> list[dict[str, Any]]:
    return store.read(folder, "decode").rows("candidates", store.CANDIDATES)


def similarities(folder: Path) -> list[list[float]]:
    return [row["similarity"] for row in store.read(folder, "score").rows("scored", store.SCORED)]


def counts(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / store.MANIFEST).read_text())["counts"]


# Sources and targets that are too long

POSITIONS = 64


def test_fault_33_texts_longer_than_the_model_are_cut_and_counted_in_every_stage(tmp_path: Path, tokenizer: Any) -> None:
    """A model of 64 positions; in every split one row of two is far longer than that."""
    files = {}
    for number, split in enumerate(("train", "validation", "test")):
        long, short = (sentence(2 * number + i, length) for i, length in enumerate((400, 8)))
        rows = [{"source": long, "target": [long, "a fox"]}, {"source": short, "target": [short]}]
        files[split] = write_rows(tmp_path / f"{split}.jsonl", rows)
    data = str(prepare.run(prepare.Config(output=str(tmp_path / "data"), **files)))
    start = tmp_path / "start"
    seq2seq.save(Seq2Seq(tiny_model("bart", 0, len(tokenizer)), tokenizer), start)
    places = {"data": data, "model": str(start)}
    lengths = {"max_source_length": POSITIONS, "max_target_length": POSITIONS}
    training = {**lengths, "batch_size": 2, "max_steps": 1, "eval_steps": 1}
    tuned = finetune.run(finetune.Config(**places, output=str(tmp_path / "tuned"), **training))
    assert counts(tuned)["sources_cut"] == 2  # once for each reference
    assert counts(tuned)["targets_cut"] == 1
    search = {"max_new_tokens": 4, "max_source_length": POSITIONS}
    found = decode.run(decode.Config(**places, output=str(tmp_path / "decode"), num_candidates=3, **search))
    assert counts(found)["sources_cut"] == 1
    scored = score.run(score.Config(**places, candidates=str(found), output=str(tmp_path / "score"), max_target_length=POSITIONS))
    assert counts(scored)["targets_cut"] == 1
    trained = calibrate.run(calibrate.Config(**places, scored=str(scored), output=str(tmp_path / "calibrate"), **training))
    assert {name: counts(trained)[name] for name in ("sources_cut", "targets_cut")} == {"sources_cut": 1, "targets_cut": 1}
    evaluated = evaluate.run(
        evaluate.Config(**places, output=str(tmp_path / "ev"), num_candidates=(2,), max_target_length=POSITIONS, **search)
    )
    assert {name: counts(evaluated)[name] for name in ("sources_cut", "targets_cut")} == {"sources_cut": 1, "targets_cut": 1}


def test_fault_33_lengths_beyond_the_models_positions_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    data = str(prepare.run(prepare.Config(output=str(tmp_path / "data"), **{
        split: write_rows(tmp_path / f"{split}.jsonl", made_up_rows(first, 2))
        for split, first in (("train", 0), ("validation", 10), ("test", 20))
    })))  # fmt: skip
    start = tmp_path / "start"
    seq2seq.save(Seq2Seq(tiny_model("bart", 0, len(tokenizer)), tokenizer), start)
    places = {"data": data, "model": str(start), "output": str(tmp_path / "out")}
    search = {"max_new_tokens": 4, "max_source_length": POSITIONS}
    for stage, values in (
        (decode, {"max_source_length": POSITIONS + 1, "max_new_tokens": 4}),
        (finetune, {"max_source_length": POSITIONS, "max_target_length": POSITIONS + 1}),
        (evaluate, {**search, "max_target_length": POSITIONS + 1}),
    ):
        with pytest.raises(CalibeamError, match=rf"is {POSITIONS + 1}, but the model has {POSITIONS} positions"):
            stage.run(stage.Config(**places, **values))


# decode

METHODS = [{"method": "beam"}, {"method": "diverse_beam", "groups": 2, "diversity": 0.5}, {"method": "nucleus", "top_p": 0.2}]


@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings["method"])
def test_fault_28_candidates_are_distinct_ordered_and_have_their_own_log_p(
    settings: dict[str, Any], tmp_path: Path, data: str, tuned: str
) -> None:
    places = {"data": data, "model": tuned}
    folder, other = (
        decode.run(decode.Config(**places, output=str(tmp_path / f"size-{size}"), batch_size=size, **SEARCH, **settings))
        for size in (1, 5)
    )
    rows, model = decoded(folder), seq2seq.load(seq2seq.locate(tuned), device="cpu")
    examples = store.read(data, "prepare").examples("train")
    assert [row["id"] for row in rows] == [example.id for example in examples]
    for row, again, example in zip(rows, decoded(other), examples, strict=True):
        assert row["token_ids"] == again["token_ids"]
        assert row["times_drawn"] == again["times_drawn"]
        assert row["log_p"] == pytest.approx(again["log_p"], abs=1e-4)
        assert len(set(map(tuple, row["token_ids"]))) == len(row["token_ids"]) <= 4
        assert row["log_p"] == sorted(row["log_p"], reverse=True)
        assert row["texts"] == [model.text(ids) for ids in row["token_ids"]]
        sources, mask = model.batch(model.encode_sources([example.source], 24)[0])
        token_ids, _ = model.batch(row["token_ids"])
        log_p = calibeam.sequence_log_p(model.model, sources, mask, token_ids[None])
        assert row["log_p"] == pytest.approx(log_p[0].tolist(), abs=1e-4)
    if settings["method"] == "nucleus":
        assert all(sum(row["times_drawn"]) == 4 for row in rows)
        assert counts(folder)["merged_duplicates"] > 0
    total = sum(len(row["log_p"]) for row in rows)
    assert counts(folder)["candidates"] == total
    assert counts(folder)["merged_duplicates"] == sum(sum(row["times_drawn"]) for row in rows) - total


def test_samples_depend_on_the_seed_and_not_on_the_batch(tmp_path: Path, data: str, tuned: str) -> None:
    def sampled(name: str, **settings: Any) -> list[Any]:
        config = decode.Config(data=data, model=tuned, output=str(tmp_path / name), method="nucleus", **SEARCH, **settings)
        return [row["token_ids"] for row in decoded(decode.run(config))]

    together = sampled("together", seed=1)
    assert sampled("apart", seed=1, batch_size=1) == together
    assert sampled("other", seed=2) != together


@pytest.mark.parametrize("stage", [decode, evaluate])
def test_more_tokens_at_least_than_at_most_are_refused(stage: Any, tmp_path: Path, data: str, tuned: str) -> None:
    with pytest.raises(CalibeamError, match="min_new_tokens"):
        stage.run(stage.Config(data=data, model=tuned, output=str(tmp_path / "out"), min_new_tokens=9, max_new_tokens=8))


def test_evaluate_refuses_groups_that_do_not_divide_the_candidates(tmp_path: Path, data: str, tuned: str) -> None:
    settings = {"methods": ("diverse_beam",), "num_candidates": (4, 5), "groups": 2, "max_new_tokens": 8}
    with pytest.raises(CalibeamError, match="groups"):
        evaluate.run(evaluate.Config(data=data, model=tuned, output=str(tmp_path / "out"), **settings))


# score


def hidden_states(model: Seq2Seq, source: str, token_ids: list[int]) -> Tensor:
    """The decoder's last states by transformers' own way, one sequence at a time."""
    sources, mask = model.batch(model.encode_sources([source], 24)[0])
    output = model.model(
        input_ids=sources, attention_mask=mask, labels=torch.tensor([token_ids]), output_hidden_states=True
    )  # fmt: skip
    return output.decoder_hidden_states[-1][0]


@pytest.mark.parametrize("similarity", ["decoder", "tokens", "rouge"])
def test_a_score_is_the_similarity_to_the_best_reference(
    similarity: str, tmp_path: Path, data: str, tuned: str, candidates: str
) -> None:
    config = score.Config(
        data=data, model=tuned, candidates=candidates, output=str(tmp_path / "score"), similarity=similarity, batch_size=5
    )
    found = similarities(score.run(config))
    model = seq2seq.load(seq2seq.locate(tuned), device="cpu")
    scorer = rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)

    def by_hand(source: str, text: str, token_ids: list[int], target: str) -> float:
        if similarity == "rouge":
            return sum(scorer.score(target, text)[kind].fmeasure for kind in ROUGE) / 3
        target_ids = model.encode_targets([target], 128)[0][0]
        if similarity == "tokens":
            states = [model.model.get_input_embeddings()(torch.tensor(ids)) for ids in (token_ids, target_ids)]
        else:
            states = [hidden_states(model, source, ids) for ids in (token_ids, target_ids)]
        masks = [torch.ones(len(state), dtype=torch.bool) for state in states]
        return span_similarity(*states, *masks).item()

    best = []
    for row, example, values in zip(decoded(candidates), store.read(data, "prepare").examples("train"), found, strict=True):
        assert len(example.targets) == 2
        for text, token_ids, value in zip(row["texts"], row["token_ids"], values, strict=True):
            each = [by_hand(example.source, text, token_ids, target) for target in example.targets]
            assert value == pytest.approx(max(each), abs=1e-4)
            best.append(each.index(max(each)))
    assert {0, 1} == set(best)


def more_letters(candidates: Outputs, target: Outputs) -> Tensor:
    return torch.tensor([[float(len(text)) for text in texts] for texts in candidates.texts])


def test_a_similarity_of_ones_own(tmp_path: Path, data: str, tuned: str, candidates: str) -> None:
    config = score.Config(data=data, model=tuned, candidates=candidates, output=str(tmp_path / "score"), similarity=more_letters)
    folder = score.run(config)
    assert similarities(folder) == [[len(text) for text in row["texts"]] for row in decoded(candidates)]
    assert json.loads((folder / store.MANIFEST).read_text())["settings"]["similarity"] == functions.identity(more_letters)


def test_a_similarity_of_the_wrong_shape_is_refused(tmp_path: Path, data: str, tuned: str, candidates: str) -> None:
    def first_only(candidates: Outputs, target: Outputs) -> Tensor:
        return more_letters(candidates, target)[:, 0]

    def a_list(candidates: Outputs, target: Outputs) -> Any:
        return more_letters(candidates, target).tolist()

    def takes_one(candidates: Outputs) -> Any:
        return more_letters(candidates, candidates)

    places = {"data": data, "model": tuned, "candidates": candidates, "output": str(tmp_path / "score")}
    for function, told in (
        (first_only, r"first_only must give a tensor of shape \[16, 4\], and gave one of shape \[16\]"),
        (a_list, r"a_list must give a tensor of shape \[16, 4\], and gave list"),
        (takes_one, r"takes_one: TypeError: .*takes 1 positional argument but 2 were given"),
    ):
        with pytest.raises(CalibeamError, match=rf"^similarity [\w.]+:.*{told}"):
            score.run(score.Config(**places, similarity=function), force=True)


def test_a_loss_of_the_wrong_shape_is_refused(tmp_path: Path, data: str, tuned: str, scored: str) -> None:
    def of_all(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
        return -(log_p * similarity * mask).sum()

    places = {"data": data, "model": tuned, "scored": scored, "output": str(tmp_path / "out")}
    with pytest.raises(CalibeamError, match=r"^loss .*of_all must give a tensor of shape \[4\], and gave one of shape \[\]"):
        calibrate.run(calibrate.Config(**places, loss=of_all, micro_batch_size=4, max_source_length=20, max_target_length=8))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_similarity_that_is_not_finite_is_refused_and_the_example_named(
    value: float, data: str, tuned: str, candidates: str, tmp_path: Path
) -> None:
    def broken(found: Outputs, target: Outputs) -> Tensor:
        return torch.full(found.mask.shape[:-1], value)

    config = score.Config(data=data, model=tuned, candidates=candidates, output=str(tmp_path / "score"), similarity=broken)
    with pytest.raises(CalibeamError, match=rf"the similarity of a candidate of row-\d+ is not finite: \[{value}"):
        score.run(config)
    assert not (tmp_path / "score").exists()


def test_bertscore_as_a_similarity_takes_the_best_reference(
    tmp_path: Path, data: str, tuned: str, candidates: str, encoder: str
) -> None:
    settings = {"similarity": "bertscore", "bertscore_model": encoder, "bertscore_layer": 2, "bertscore_idf": True}
    places = {"data": data, "model": tuned, "candidates": candidates, "output": str(tmp_path / "score")}
    folder = score.run(score.Config(**places, **settings, batch_size=5))
    examples = store.read(data, "prepare").examples("train")
    every = [text for example in examples for text in example.targets]
    bert = BertScore(Path(encoder), layer=2, idf_references=every, device="cpu")
    for row, example, values in zip(decoded(candidates), examples, similarities(folder), strict=True):
        each = [bert.score(row["texts"], [target] * len(row["texts"]))[:, 2] for target in example.targets]
        assert values == pytest.approx(torch.stack(each).amax(0).tolist(), abs=1e-5)
    assert len({round(value, 3) for values in similarities(folder) for value in values}) > 5
    with pytest.raises(CalibeamError, match=r"\n  .*: other contents\n"):
        score.run(score.Config(**places, **{**settings, "bertscore_model": str(tiny_encoder("roberta", tmp_path / "other"))}))


def test_scoring_refuses_candidates_of_another_model_or_of_other_data(
    tmp_path: Path, data: str, tuned: str, candidates: str, model_folder: Make, rows_file: Make
) -> None:
    rows = str(rows_file("rows.jsonl", 16))
    other = str(prepare.run(prepare.Config(output=str(tmp_path / "other"), train=rows, validation=rows)))
    given = {"data": data, "model": tuned, "candidates": candidates, "output": str(tmp_path / "score")}
    with pytest.raises(CalibeamError, match="made with a different model than"):
        score.run(score.Config(**{**given, "model": str(model_folder("t5", seed=1))}))
    with pytest.raises(CalibeamError, match="made with a different data than"):
        score.run(score.Config(**{**given, "data": other}))
    assert not (tmp_path / "score").exists()


# calibrate


def a_config(**settings: Any) -> calibrate.Config:
    return calibrate.Config(**{"data": "", "model": "", "scored": "", "output": "", **LENGTHS, **settings})


def a_batch(model: Seq2Seq, count: int = 5) -> tuple[Any, ...]:
    """Sources, targets and scored candidates of many lengths, some with fewer than others."""
    sources, _ = model.encode_sources([sentence(i, 4 + i) for i in range(count)], 24)
    targets, _ = model.encode_targets([sentence(50 + i, 1 + i) for i in range(count)], 10)
    rows = []
    for i in range(count):
        token_ids, _ = model.encode_targets([sentence(100 + 10 * i + k, 1 + k) for k in range(2 + i % 3)], 10)
        rows.append({"token_ids": token_ids, "similarity": [0.5 * k for k in range(len(token_ids))]})
    return sources, targets, rows, range(count)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("family", ["t5", "t5-untied", "bart", "pegasus"])
def test_fault_31_the_divergence_from_the_reference_is_0_before_the_first_step(family: str, count: int, tokenizer: Any) -> None:
    model, reference = (Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer) for _ in range(2))
    step = calibrate.CalibrationStep(model, Running(reference), a_config(regularizer="kl"))
    assert step.loss(step.batch(*a_batch(model, count)))["regularization"].item() == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        model.model.get_decoder().embed_tokens.weight.mul_(1.1)
    assert step.loss(step.batch(*a_batch(model, count)))["regularization"] > 0.0


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_fault_31_the_cross_entropy_regularizer_is_the_finetuning_loss(family: str, tokenizer: Any) -> None:
    model = Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer)
    sources, targets, rows, seeds = a_batch(model)
    step = calibrate.CalibrationStep(model, None, a_config(regularizer="cross_entropy", reg_weight=3.0))
    figures = {name: value.item() for name, value in step.loss(step.batch(sources, targets, rows, seeds)).items()}
    by_hand = 0.0
    for source, target in zip(sources, targets, strict=True):
        output = model.model(input_ids=torch.tensor([source]), labels=torch.tensor([target]))
        by_hand += output.loss.item() * len(target)
    assert figures["regularization"] == pytest.approx(by_hand, rel=1e-5)
    assert figures["loss"] == pytest.approx(figures["calibration"] + 3.0 * by_hand, rel=1e-5)


def test_the_weight_of_the_regularizer_follows_the_learning_rate(tokenizer: Any) -> None:
    model = Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer)
    for rate in (1e-5, 1e-4, 3e-6):
        step = calibrate.CalibrationStep(model, Running(copy.deepcopy(model)), a_config(learning_rate=rate))
        assert rate * step.reg_weight == pytest.approx(1e-5)
    assert calibrate.CalibrationStep(model, Running(copy.deepcopy(model)), a_config(reg_weight=0.0)).reg_weight == 0.0


@pytest.mark.parametrize(
    ("loss", "regularizer", "pairs"),
    [*itertools.product(CALIBRATION_LOSSES, REGULARIZERS, ["sampled"]), *itertools.product(["rank", "margin"], ["kl"], ["all"])],
)
def test_every_loss_and_regularizer_runs_and_changes_the_model(
    loss: str, regularizer: str, pairs: str, tmp_path: Path, data: str, tuned: str, scored: str
) -> None:
    settings = {"loss": loss, "regularizer": regularizer, "pairs": pairs, "learning_rate": 1e-3, "reg_weight": 1.0}
    size = {"batch_size": 8, "max_steps": 1, "select_examples": 2, "select_num_beams": 2, **LENGTHS}
    folder = calibrate.run(
        calibrate.Config(data=data, model=tuned, scored=scored, output=str(tmp_path / "out"), **settings, **size)
    )
    start, step, end = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    assert math.isfinite(step["train"]["loss"])
    assert abs(end["validation"]["perplexity"] - start["validation"]["perplexity"]) > 1e-3
    AutoModelForSeq2SeqLM.from_pretrained(folder / "model")


def test_calibration_raises_the_agreement_of_likelihood_and_similarity(
    tmp_path: Path, data: str, tuned: str, scored: str
) -> None:
    settings = {"learning_rate": 1e-3, "reg_weight": 0.0, "pairs": "all", "batch_size": 16, "max_steps": 8, **LENGTHS}
    size = {"select_examples": 1, "select_num_beams": 1, "eval_steps": 8}
    folder = calibrate.run(
        calibrate.Config(data=data, model=tuned, scored=scored, output=str(tmp_path / "out"), **settings, **size)
    )
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    agreement = [record["train"]["agreement"] for record in records if "train" in record]
    assert agreement[-1] > agreement[0] + 0.1


def test_it_says_how_far_the_likelihoods_of_a_source_lie_apart(
    tmp_path: Path, data: str, tuned: str, scored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside beta, where the loss has one: no pair may reach the margin."""
    log_p = [row["log_p"] for row in store.read(scored, "score").rows("scored", store.SCORED)]
    mean = sum(max(own) - min(own) for own in log_p) / len(log_p)
    size = {"beta": 2.5, "batch_size": 8, "max_steps": 1, "select_examples": 1, "select_num_beams": 1, **LENGTHS}
    for loss, margin in (("rank", ", beta 2.5"), ("reward", "")):
        output = str(tmp_path / loss)
        calibrate.run(calibrate.Config(data=data, model=tuned, scored=scored, output=output, loss=loss, **size))
        said = " ".join(capsys.readouterr().out.split())
        assert f"; lambda 1{margin}; log P of a source's candidates spans {mean:.3g} on average" in said


# The type of products


def figures_in(dtype: str, places: dict[str, str], candidates: str, scored: str, output: Path) -> dict[str, list[float]]:
    """Of every stage that runs a model, on a CPU, all of them with the same model, candidates and scores."""
    small = {"batch_size": 8, "max_steps": 1, "select_examples": 2, "select_num_beams": 2, **LENGTHS}
    given = {**places, "device": "cpu", "dtype": dtype}
    search = {**SEARCH, "num_candidates": (2,), "max_target_length": 10}
    tuned = finetune.run(finetune.Config(**given, **small, output=str(output / "tuned")))
    found = decode.run(decode.Config(**given, **SEARCH, output=str(output / "decode")))
    compared = score.run(score.Config(**given, candidates=candidates, output=str(output / "score")))
    last = calibrate.run(calibrate.Config(**given, **small, scored=scored, output=str(output / "calibrated")))
    evaluation = evaluate.run(evaluate.Config(**given, **search, output=str(output / "evaluate")))
    assert {weight.dtype for weight in load_file(last / "model" / "model.safetensors").values()} == {torch.float32}
    logs = {folder.name: [*map(json.loads, (folder / "log.jsonl").read_text().splitlines())] for folder in (tuned, last)}
    return {
        **{name: [record["train"]["loss"] for record in records if "train" in record] for name, records in logs.items()},
        **{f"{name}, validation": [records[0]["validation"]["perplexity"]] for name, records in logs.items()},
        "divergence": [record["train"]["regularization"] for record in logs["calibrated"] if "train" in record],
        "decode": [row["log_p"][0] for row in decoded(found)],
        "score": [row["similarity"][0] for row in store.read(compared, "score").rows("scored", store.SCORED)],
        "evaluate": [json.loads((evaluation / "results.json").read_text())["perplexity"]],
    }


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus", "m2m_100"])
def test_products_are_in_the_type_that_is_asked_for(family: str, tmp_path: Path, data: str, tokenizer: Any) -> None:
    """A bfloat16 has 8 bits where a float32 has 24: figures are near, and not the same. On a CPU, nobody gets it unasked."""
    start = tmp_path / "start"
    seq2seq.save(Seq2Seq(tiny_model(family, 0, len(tokenizer)), tokenizer), start)
    places = {"data": data, "model": str(start)}
    candidates = str(decode.run(decode.Config(**places, **SEARCH, output=str(tmp_path / "decode"))))
    scored = str(score.run(score.Config(**places, candidates=candidates, output=str(tmp_path / "score"))))
    plain, usual, short = (
        figures_in(dtype, places, candidates, scored, tmp_path / dtype) for dtype in ("float32", "auto", "bfloat16")
    )
    assert plain == usual
    for figure, values in plain.items():
        if figure == "divergence":  # before the first step: in both of two models' passes the rounding is the same
            assert max(map(abs, short[figure])) < 1e-3
            continue
        assert short[figure] != values, figure
        assert short[figure] == pytest.approx(values, rel=0.1, abs=0.1), figure


def test_what_was_made_in_another_type_is_not_taken_for_this(tmp_path: Path, data: str, tuned: str) -> None:
    settings = {"data": data, "model": tuned, "output": str(tmp_path / "decode"), "split": "validation", **SEARCH}
    decode.run(decode.Config(**settings))
    with pytest.raises(CalibeamError, match=r"settings\.dtype: 'auto' before, 'bfloat16' now"):
        decode.run(decode.Config(**settings, dtype="bfloat16"))
    with pytest.raises(CalibeamError, match="dtype must be one of auto, float32, bfloat16, got 'float16'"):
        decode.Config(**settings, dtype="float16")


def test_rows_without_ids_do_not_mix_the_splits(tmp_path: Path, tuned: str) -> None:
    """Both files number their rows from 1; calibration has to learn the training targets all the same."""
    files = {}
    for name, first in (("train", 0), ("validation", 100), ("test", 200)):
        rows = [{"source": row["source"], "target": row["target"][0]} for row in made_up_rows(first, 4)]
        files[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    folders = {"data": str(prepare.run(prepare.Config(output=str(tmp_path / "data"), **files))), "model": tuned}
    splits = {split: store.read(folders["data"], "prepare").examples(split) for split in ("train", "validation")}
    assert [row.id for row in splits["train"]] == [row.id for row in splits["validation"]] == ["1", "2", "3", "4"]
    found = decode.run(decode.Config(**folders, output=str(tmp_path / "decode"), **SEARCH))
    scored = score.run(score.Config(**folders, candidates=str(found), output=str(tmp_path / "score")))
    seen: list[list[int]] = []

    def watching(logits: Tensor, reference_logits: Tensor | None, target: Tensor, mask: Tensor) -> Tensor:
        seen.extend(row[kept].tolist() for row, kept in zip(target, mask, strict=True))
        return REGULARIZERS["kl"](logits, reference_logits, target, mask)

    calibrate.run(
        calibrate.Config(
            **folders,
            scored=str(scored),
            output=str(tmp_path / "out"),
            regularizer=watching,
            batch_size=4,
            max_steps=1,
            **LENGTHS,
        )
    )
    model = seq2seq.load(seq2seq.locate(tuned), device="cpu")
    targets, _ = model.encode_targets([row.targets[0] for row in splits["train"]], 10)
    assert {tuple(row) for row in seen} == {tuple(row) for row in targets}  # each again for the gradient
    sources = [row.source for row in splits["train"]]
    for row, source in zip(decoded(found), sources, strict=True):
        ids, mask = model.batch(model.encode_sources([source], 24)[0])
        log_p = calibeam.sequence_log_p(model.model, ids, mask, model.batch(row["token_ids"])[0][None])
        assert row["log_p"] == pytest.approx(log_p[0].tolist(), abs=1e-4)


# evaluate

GRID = {"methods": ("beam", "diverse_beam", "nucleus"), "num_candidates": (1, 4), "length_alphas": (0.0, 1.0)}


@pytest.fixture(scope="module")
def evaluation(work: Path, data: str, tuned: str) -> store.Folder:
    config = evaluate.Config(data=data, model=tuned, output=str(work / "evaluate"), max_new_tokens=8, **LENGTHS, **GRID)
    return store.read(evaluate.run(config), "evaluate")


@pytest.fixture(scope="module")
def results(evaluation: store.Folder) -> dict[str, Any]:
    return json.loads((evaluation.path / "results.json").read_text())


def test_every_combination_is_evaluated_and_signed(results: dict[str, Any]) -> None:
    keys = ("method", "num_candidates", "length_alpha")
    assert [tuple(row[key] for key in keys) for row in results["settings"]] == list(itertools.product(*GRID.values()))
    assert len({row["setting"] for row in results["settings"]}) == 12
    for row in results["settings"]:
        parts = row["signature"].split("|")
        assert {f"decoder:{row['method']}", f"candidates:{row['num_candidates']}", f"alpha:{row['length_alpha']:g}"} <= {*parts}
        assert {"split:test", "similarity:decoder", "tokens:0-8", f"calibeam:{calibeam.__version__}"} <= {*parts}
        assert {"source:24", "dtype:auto"} <= {*parts}
        assert ("top_p:0.9" in parts) == (row["method"] == "nucleus")
        assert ("diversity:0.5" in parts) == (row["method"] == "diverse_beam")


def test_shards_change_nothing_and_no_split_is_ever_held(tmp_path: Path, data: str, tuned: str) -> None:
    """Of likelihoods, the last digits, for batches are others."""
    settings = {"num_candidates": (1, 3), "methods": ("beam", "nucleus"), "max_new_tokens": 8, "metrics": ("gem",), **LENGTHS}
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(store.Folder, "examples")
        patch.delattr(store.Folder, "rows")
        for size in (shards.SIZE, 2):
            patch.setattr(shards, "SIZE", size)
            given = {"data": data, "model": tuned, "output": str(tmp_path / str(size)), "similarity": "rouge"}
            folders.append(store.read(evaluate.run(evaluate.Config(**given, **settings)), "evaluate"))
        comparison = report.compare(*folders)
    whole, sharded = ({(row["setting"], row["id"]): row for row in each.rows("outputs", evaluate.OUTPUTS)} for each in folders)
    assert [len([*each.path.glob("outputs-*.parquet")]) for each in folders] == [1, 3]
    assert whole.keys() == sharded.keys()
    for key, row in whole.items():
        assert sharded[key] == {**row, "log_p": pytest.approx(row["log_p"], abs=1e-4)}
    before, after = comparison["before"], comparison["after"]
    assert after == {**before, "perplexity": pytest.approx(before["perplexity"], rel=1e-5)}
    reliability = report.reliability(comparison, *folders)
    of_before, of_after = ([p["quality"] for p in reliability if p["model"] == side] for side in (report.BEFORE, report.AFTER))
    assert of_after == of_before


def test_the_figures_are_those_of_the_outputs(evaluation: store.Folder, results: dict[str, Any], data: str) -> None:
    targets = {example.id: example.targets for example in store.read(data, "prepare").examples("test")}
    scorer = rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)
    outputs = evaluation.rows("outputs", evaluate.OUTPUTS)
    assert results["examples"] == len(targets) == 6
    for result in results["settings"]:
        rows = [row for row in outputs if row["setting"] == result["setting"]]
        assert [row["id"] for row in rows] == list(targets)
        each = [scorer.score_multi(list(targets[row["id"]]), row["output"]) for row in rows]
        means = {kind: sum(scores[kind].fmeasure for scores in each) / len(each) for kind in ROUGE}
        assert {kind: result[kind] for kind in ROUGE} == pytest.approx(means)
        assert result["r_m"] == pytest.approx(math.prod(means.values()) ** (1 / 3))
        assert result["words"] == pytest.approx(sum(len(row["output"].split()) for row in rows) / len(rows))
        assert result["repetition_rate"] == sum(row["repeats"] for row in rows) / len(rows)
    assert any(result["rouge2"] > 0 for result in results["settings"])


def test_fault_38_what_separates_sentences_is_a_setting_and_in_the_signature(tmp_path: Path, tuned: str) -> None:
    """Two lines of a reference, in the other order than the output has them, match one by one."""
    rows = made_up_rows(8, 2)
    texts = []
    for newline in ("<n>", "\n"):
        for row in rows:
            row["target"] = newline.join(row["source"].split()[::-1])
        split = write_rows(tmp_path / f"{len(newline)}.jsonl", rows)
        data = prepare.run(
            prepare.Config(output=str(tmp_path / f"data-{len(newline)}"), train=split, validation=split, test=split)
        )
        settings = {"num_candidates": (1,), "max_new_tokens": 8, **LENGTHS, "newline": newline}
        output = str(tmp_path / f"ev-{len(newline)}")
        folder = evaluate.run(evaluate.Config(data=str(data), model=tuned, output=output, **settings))
        (result,) = json.loads((folder / "results.json").read_text())["settings"]
        assert f"sentences by newline or {newline!r}" in result["signature"]
        texts.append(result["rougeLsum"])
    assert texts[0] == texts[1] > 0


def test_the_output_is_the_candidate_that_ranks_first(evaluation: store.Folder, results: dict[str, Any]) -> None:
    alphas = {result["setting"]: result["length_alpha"] for result in results["settings"]}
    outputs = evaluation.rows("outputs", evaluate.OUTPUTS)
    for row, output in zip(evaluation.rows("candidates", evaluate.CANDIDATES), outputs, strict=True):
        assert (row["setting"], row["id"]) == (output["setting"], output["id"])
        rank = [log_p / len(ids) ** alphas[row["setting"]] for log_p, ids in zip(row["log_p"], row["token_ids"], strict=True)]
        assert rank[0] == pytest.approx(max(rank), abs=1e-5)
        assert (output["output"], output["log_p"]) == (row["texts"][0], row["log_p"][0])


def test_every_token_has_its_log_p_and_reads_as_in_the_text(evaluation: store.Folder, tuned: str) -> None:
    """The log-probs are those of the model's own logits."""
    folder = seq2seq.locate(tuned)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    examples = store.read(evaluation.manifest["input_places"]["data"], "prepare").examples("test")
    sources = {example.id: tokenizer(example.source, truncation=True, max_length=24, return_tensors="pt") for example in examples}
    for row in evaluation.rows("candidates", evaluate.CANDIDATES):
        assert [sum(values) for values in row["token_log_p"]] == pytest.approx(row["log_p"], abs=1e-4)
        for ids, pieces, text in zip(row["token_ids"], row["pieces"], row["texts"], strict=True):
            ending = tokenizer.convert_ids_to_tokens(ids[-1:]) if ids[-1] == tokenizer.eos_token_id else []
            assert pieces[len(ids) - len(ending) :] == ending
            assert "".join(pieces[: len(ids) - len(ending)]).strip() == text
        labels = torch.tensor([row["token_ids"][0]])
        with torch.no_grad():
            log_p = model(**sources[row["id"]], labels=labels).logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]
        assert row["token_log_p"][0] == pytest.approx(log_p.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["similarity", "rouge"])
def test_agreement_is_the_share_of_pairs_in_the_same_order(kind: str, evaluation: store.Folder, results: dict[str, Any]) -> None:
    candidates = evaluation.rows("candidates", evaluate.CANDIDATES)
    for result in results["settings"]:
        agreeing, pairs = 0.0, 0
        for row in candidates:
            if row["setting"] != result["setting"]:
                continue
            for (p, q), (other_p, other_q) in itertools.combinations(zip(row["log_p"], row[kind], strict=True), 2):
                if q != other_q:
                    pairs += 1
                    agreeing += 0.5 if p == other_p else (p > other_p) == (q > other_q)
        if result["num_candidates"] == 1:
            assert result[f"{kind}_agreement"] is None
        else:
            assert result[f"{kind}_agreement"] == pytest.approx(agreeing / pairs)


def test_perplexity_is_that_of_the_models_own_loss(results: dict[str, Any], data: str, tuned: str) -> None:
    folder = seq2seq.locate(tuned)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for example in store.read(data, "prepare").examples("test"):
        source = tokenizer(example.source, truncation=True, max_length=24, return_tensors="pt")
        for target in example.targets:
            labels = tokenizer(target, truncation=True, max_length=10, return_tensors="pt").input_ids
            with torch.no_grad():
                total += model(input_ids=source.input_ids, labels=labels).loss.item() * labels.shape[1]
            tokens += labels.shape[1]
    assert results["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert results["perplexity_signature"].startswith("perplexity|per token")


def test_similarity_is_measured_in_the_reference_model(tmp_path: Path, data: str, tuned: str, model_folder: Make) -> None:
    settings = {"num_candidates": (4,), "max_new_tokens": 8, **LENGTHS}
    folders = [
        evaluate.run(evaluate.Config(data=data, model=tuned, reference=judge, output=str(tmp_path / name), **settings))
        for name, judge in (("own", ""), ("named", tuned), ("other", str(model_folder("t5", seed=3))))
    ]
    own, named, other = (store.read(folder, "evaluate").rows("candidates", evaluate.CANDIDATES) for folder in folders)
    assert own == named
    assert [row["token_ids"] for row in own] == [row["token_ids"] for row in other]
    assert [row["similarity"] for row in own] != [row["similarity"] for row in other]


def more_words(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[int]:
    return [len(text.split()) - len(wanted[0].split()) for text, wanted in zip(predictions, references, strict=True)]


@pytest.mark.parametrize(
    ("given", "measured"), [((), ["rouge", "repetition", "gem"]), (("squad_qg",), ["rouge", "repetition", "squad_qg"])]
)
def test_a_task_is_measured_by_its_own_metric_unless_others_are_named(
    given: tuple[str, ...], measured: list[str], tmp_path: Path, tuned: str
) -> None:
    for name, first in (("train", 0), ("validation", 100), ("test", 8)):
        write_rows(tmp_path / f"{name}.jsonl", made_up_rows(first, 4))
    data = prepare.run(prepare.Config(output=str(tmp_path / "data"), task="commongen", path=str(tmp_path)))
    settings = {"num_candidates": (1,), "max_new_tokens": 8, "metrics": given, **LENGTHS}
    folder = evaluate.run(evaluate.Config(data=str(data), model=tuned, output=str(tmp_path / "out"), **settings))
    (result,) = json.loads((folder / "results.json").read_text())["settings"]
    assert list(result["metrics"]) == measured


@pytest.fixture(scope="module")
def measured(work: Path, data: str, tuned: str, encoder: str) -> store.Folder:
    """By every metric there is, and one of our own."""
    config = evaluate.Config(
        data=data, model=tuned, output=str(work / "measured"), max_new_tokens=8, num_candidates=(1, 2), **LENGTHS,
        metrics=("squad_qg", "msmarco", "gem", "bertscore", more_words), bertscore_model=encoder, similarity=more_letters,
    )  # fmt: skip
    return store.read(evaluate.run(config), "evaluate")


def test_every_metric_is_that_of_the_outputs_with_interval_and_signature(measured: store.Folder, data: str, encoder: str) -> None:
    targets = [example.targets for example in store.read(data, "prepare").examples("test")]
    outputs = measured.rows("outputs", evaluate.OUTPUTS)
    bert = BertScore(Path(encoder), device="cpu")
    settings = json.loads((measured.path / "results.json").read_text())["settings"]
    assert len(settings) == 2
    for result in settings:
        texts = [row["output"] for row in outputs if row["setting"] == result["setting"]]
        for name in ("rouge", "repetition", "squad_qg", "msmarco", "gem"):
            metric = official.METRICS[name]
            expected = metric.figures(metric.statistics(texts, targets).sum(0), len(texts))
            figures = result["metrics"][name]["figures"]
            assert list(figures) == list(expected)
            assert [values["value"] for values in figures.values()] == pytest.approx(
                [float(value) for value in expected.values()]
            )
            assert result["metrics"][name]["signature"] == metric.signed()
        figures = result["metrics"]["bertscore"]["figures"]
        expected = bert.statistics(texts, targets).mean(0).tolist()
        assert [figures[name]["value"] for name in ("precision", "recall", "f1")] == pytest.approx(expected, abs=1e-3)
        own = result["metrics"][f"{__name__}:more_words"]
        assert own["figures"]["mean"]["value"] == pytest.approx(sum(more_words(texts, targets)) / len(texts))
        assert functions.identity(more_words) in own["signature"]
        assert result["r_m"] == pytest.approx(result["metrics"]["rouge"]["figures"]["r_m"]["value"] / 100)
        for found in result["metrics"].values():
            assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in found["figures"].values())
        assert f"similarity:{functions.identity(more_letters)}" in result["signature"]
    assert any(f["high"] > f["low"] for found in settings[0]["metrics"].values() for f in found["figures"].values())


def test_the_statistics_of_every_example_are_kept(measured: store.Folder) -> None:
    rows, outputs = measured.rows("statistics", evaluate.STATISTICS), measured.rows("outputs", evaluate.OUTPUTS)
    for output in outputs:
        (rouge,) = [
            row for row in rows if (row["setting"], row["metric"], row["id"]) == (output["setting"], "rouge", output["id"])
        ]
        assert rouge["statistics"] == [output[kind] for kind in ROUGE]
    assert len(rows) == 7 * len(outputs)


def test_two_metrics_of_one_name_are_refused(tmp_path: Path, data: str, tuned: str) -> None:
    two = tuple(lambda predictions, references, n=n: [n] * len(predictions) for n in (1, 2))
    with pytest.raises(CalibeamError, match="two functions called"):
        evaluate.run(evaluate.Config(data=data, model=tuned, output=str(tmp_path / "out"), metrics=two, max_new_tokens=8))


def test_a_metric_that_is_not_installed_is_refused_before_any_decoding(
    tmp_path: Path, data: str, tuned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = dataclasses.replace(official.METRICS["msmarco"], packages=("no-such-package",))
    monkeypatch.setitem(official.METRICS, "msmarco", missing)
    with pytest.raises(CalibeamError, match="needs no-such-package"):
        evaluate.run(evaluate.Config(data=data, model=tuned, output=str(tmp_path / "out"), metrics=("msmarco",), **LENGTHS))
    assert "beam" not in capsys.readouterr().out


# create

TEXTS = [
    "the red fox",
    "zażółć gęślą jaźń",
    "🦊👩‍👩‍👧 🏴‍☠️",
    "two\nlines\n\nand\ttabs",
    "  spaces  around , and . marks ! ",
    "日本語 <b> \x00 \u202e",
    "<mask_1> is </s> no <pad>",
]


def test_a_created_model_loads_in_transformers_and_its_tokenizer_loses_nothing(tmp_path: Path, data: str) -> None:
    size = {"vocab_size": 280, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "num_heads": 2, "ffn_dim": 32}
    folder = create.run(create.Config(output=str(tmp_path / "new"), data=data, max_position_embeddings=40, **size))
    model, tokenizer = (auto.from_pretrained(folder / "model") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert (model.config.encoder_layers, model.config.decoder_layers, model.config.d_model) == (1, 2, 16)
    assert model.num_parameters() == counts(folder)["parameters"]
    assert len(tokenizer) == model.config.vocab_size == counts(folder)["vocabulary"] <= 280
    assert tokenizer.model_max_length == 40
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids[-1] == tokenizer.eos_token_id == model.config.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    output = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), max_new_tokens=3)
    assert output.shape[1] <= 4


def test_the_smallest_vocabulary_is_all_bytes_and_the_special_tokens(tmp_path: Path, data: str) -> None:
    given = {"output": str(tmp_path / "new"), "data": data}
    with pytest.raises(CalibeamError, match="vocab_size must be at least 261, got 260"):
        create.Config(vocab_size=260, **given)
    folder = create.run(create.Config(vocab_size=261, **given))
    assert counts(folder)["vocabulary"] == 261
