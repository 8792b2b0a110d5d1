"""The training loop, through the stages that use it, on tiny models."""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calibeam import seq2seq, store, training
from calibeam.paper.similarity import SIMILARITIES
from calibeam.records import CalibeamError, DivergedError
from calibeam.stages import calibrate, decode, evaluate, finetune, prepare, score
from conftest import sentence, tiny_model

LENGTHS = {"max_source_length": 24, "max_target_length": 10}
LOSSES = [("rank", "sampled"), ("margin", "sampled"), ("rank", "all"), ("margin", "all"), ("list_rank", "all"), ("reward", "all")]
Make = Callable[..., Path]


@pytest.fixture
def data(tmp_path: Path, rows_file: Make) -> Path:
    """8 training rows, 4 for validation, 4 for test."""
    files = {name: str(rows_file(f"{name}.jsonl", 4 + 4 * (name == "train"), first)) for first, name in
             ((0, "train"), (100, "validation"), (200, "test"))}  # fmt: skip
    return prepare.run(prepare.Config(output=str(tmp_path / "data"), **files))


@pytest.fixture
def scored(tmp_path: Path, data: Path, model_folder: Make) -> dict[str, str]:
    """What calibrate reads: data, a model with much dropout, and its own candidates, some with more than others."""
    model = {"data": str(data), "model": str(with_dropout(0.5, model_folder("t5", seed=3)))}  # one that two steps improve
    settings = {"method": "nucleus", "top_p": 0.05, "num_candidates": 6, "max_new_tokens": 8, "max_source_length": 24}
    found = decode.run(decode.Config(**model, output=str(tmp_path / "decode"), **settings))
    rows = store.read(found, "decode").rows("candidates", store.CANDIDATES)
    assert len({len(row["texts"]) for row in rows}) > 1
    return {**model, "scored": str(score.run(score.Config(**model, candidates=str(found), output=str(tmp_path / "score"))))}


COMPARED = {"regularizer": "none", "max_steps": 4, "eval_steps": 2, "pairs": "all"}


def with_dropout(rate: float, model: Path) -> Path:
    """Changes the model's config in place."""
    config = json.loads((model / "config.json").read_text())
    changes = {key: rate for key in config if "dropout" in key}
    assert changes
    (model / "config.json").write_text(json.dumps(config | changes))
    return model


def tune(data: Path, model: Path, name: str, **settings: Any) -> Path:
    given = {"learning_rate": 1e-2, "batch_size": 8, "max_steps": 2, **LENGTHS, **settings}
    return finetune.run(finetune.Config(data=str(data), model=str(model), output=str(data.with_name(name)), **given))


def calibrated(scored: dict[str, str], name: str, **settings: Any) -> Path:
    given = {"learning_rate": 1e-3, "reg_weight": 1.0, "batch_size": 8, "max_steps": 2, "select": "perplexity", **LENGTHS}
    output = f"{Path(scored['data']).parent}/{name}"
    return calibrate.run(calibrate.Config(**scored, output=output, **{**given, **settings}))


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(seq2seq.locate(folder) / "model.safetensors")


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / store.MANIFEST).read_text())


def log(folder: Path, kind: str) -> dict[int, dict[str, float]]:
    """The records of a kind, by step."""
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {record["step"]: record[kind] for record in records if kind in record}


def assert_same_training(start: Path, folders: list[Path]) -> None:
    """Losses equal to rounding, and weights by their norm: Adam magnifies rounding where a gradient is almost 0, as all of KL's
    are at the first step."""
    first, *others = folders
    assert manifest(first)["counts"]["best_step"] == 2
    before, after = weights(start), weights(first)
    moved = distance(before, after)
    assert moved > 0
    for other in others:
        for step, figures in log(first, "train").items():
            assert log(other, "train")[step] == pytest.approx(figures, rel=1e-5, abs=1e-5 if step == 1 else 1e-3)
        assert distance(weights(other), after) < 0.1 * moved


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return math.sqrt(sum((left[name] - weight).square().sum().item() for name, weight in right.items()))


# What is held


def test_examples_are_held_in_four_bytes_a_token(tmp_path: Path, tokenizer: Any) -> None:
    """And not as texts: 3,000 pairs, of which a thousand are encoded at a time."""
    model = seq2seq.Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer)
    texts = [(f"row-{i}", sentence(i, 40), sentence(i + 1, 5)) for i in range(3000)]
    config = finetune.Config(data="", model="", output="out", max_source_length=30, max_target_length=10)
    tracemalloc.start()
    pairs = training.Pairs(model, iter(texts), config, by_token=True)
    items = training.Shuffled(pairs, 8, seed=0).next()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sources, cut = model.encode_sources([source for _, source, _ in texts], 30)
    targets, _ = model.encode_targets([target for *_, target in texts], 10)
    assert [ids.tolist() for ids in map(pairs.sources.__getitem__, range(3000))] == sources
    assert [ids.tolist() for ids in map(pairs.targets.__getitem__, range(3000))] == targets
    assert pairs.cut["sources_cut"] == cut > 2000
    assert all(item == (texts[i][0], len(sources[i]), len(targets[i]), i) for item in items for i in (item.content,))
    assert held < 4.5 * sum(map(len, sources + targets)) + 100 * 3000


def test_scores_of_other_examples_are_refused(scored: dict[str, str], tmp_path: Path) -> None:
    folder = store.read(scored["scored"], "score")
    ids = [row["id"] for row in folder.rows("scored", store.SCORED)]
    model = seq2seq.load(seq2seq.locate(scored["model"]))
    config = calibrate.Config(**scored, output="out", **LENGTHS)
    for names in (ids[:-1], [*ids, "another"], [*ids[1:], ids[0]]):
        pairs = training.Pairs(model, ((name, "s", "t") for name in names), config, by_token=False)
        with pytest.raises(CalibeamError, match="does not hold the examples of its data in their order"):
            calibrate.Candidates(folder, pairs)


# Accumulation


@pytest.mark.parametrize("family", ["t5", "t5-untied"])
def test_fault_30_finetuning_does_not_depend_on_the_micro_batch(family: str, data: Path, model_folder: Make) -> None:
    """Targets differ in length, so a mean of micro-batches' means would be another loss."""
    model = with_dropout(0.0, model_folder(family))
    given = {"max_grad_norm": 1e9, "learning_rate": 1e-3}
    assert_same_training(model, [tune(data, model, f"micro-{n}", micro_batch_size=n, **given) for n in (8, 1, 2)])


@pytest.mark.parametrize(("loss", "pairs", "regularizer"), [*((*each, "kl") for each in LOSSES), (*LOSSES[0], "cross_entropy")])
def test_fault_30_calibration_does_not_depend_on_the_micro_batch(
    loss: str, pairs: str, regularizer: str, scored: dict[str, str]
) -> None:
    """Three at a time, the last two are a micro-batch of their own, which a mean of means would give too much weight."""
    given = {"loss": loss, "regularizer": regularizer, "pairs": pairs, "max_grad_norm": 1e9, "select_num_beams": 1}
    folders = [calibrated(scored, f"micro-{n}", micro_batch_size=n, **given) for n in (8, 1, 3)]
    assert_same_training(Path(scored["model"]), folders)


def test_the_finetuning_loss_is_the_mean_per_token(data: Path, model_folder: Make) -> None:
    model = with_dropout(0.0, model_folder("bart"))
    logged = log(tune(data, model, "tuned", max_steps=1, micro_batch_size=3), "train")[1]["loss"]
    loaded = seq2seq.load(model, device="cpu")
    perplexity = evaluate.mean_perplexity(loaded, store.read(data, "prepare").examples("train"), 24, 10)
    assert logged == pytest.approx(math.log(perplexity), rel=1e-5)


# Seeds


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(data: Path, model_folder: Make) -> None:
    """Smaller batches than data and dropout: both order and noise depend on the seed. They do not on what is computed again."""
    model = model_folder("pegasus")
    runs = ({"seed": 1}, {"seed": 1, "gradient_checkpointing": True}, {"seed": 2})
    first, again, other = (tune(data, model, f"run-{n}", **given, batch_size=4) for n, given in enumerate(runs))
    assert manifest(first)["counts"]["best_step"] > 0
    assert weights(first).keys() == weights(again).keys()
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(first).items())
    assert any(not torch.equal(weight, weights(other)[name]) for name, weight in weights(first).items())


def test_dropout_is_on_in_finetuning(data: Path, model_folder: Make) -> None:
    """The same batch and, at this learning rate, the same weights: only dropout can make the loss another."""
    losses = [figures["loss"] for figures in log(tune(data, model_folder("t5"), "tuned", learning_rate=1e-30), "train").values()]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_dropout_is_off_in_calibration(scored: dict[str, str]) -> None:
    steps = log(calibrated(scored, "calibrated", learning_rate=1e-30, pairs="all"), "train")
    assert steps[1]["calibration"] > 0
    assert steps[2] == pytest.approx(steps[1], rel=1e-6, abs=1e-5)


# What is not finite


def nan_loss(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    return log_p.sum(-1) * math.nan


def nan_gradient(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """0, but its gradient is 0 times infinity."""
    return (0 * log_p).abs().sqrt().sum(-1)


@pytest.mark.parametrize(("loss", "what", "named"), [(nan_loss, "loss", 2), (nan_gradient, "gradient", 4)])
def test_fault_21_what_is_not_finite_stops_the_run_with_the_examples_and_saves_nothing(
    loss: Any, what: str, named: int, scored: dict[str, str]
) -> None:
    folder = Path(scored["data"]).with_name("calibrated")
    with pytest.raises(CalibeamError, match=f"the {what} is nan at step 1") as error:
        calibrated(scored, folder.name, loss=loss, batch_size=4, micro_batch_size=2, regularizer="none")
    assert sum(f"row-{i}" in str(error.value) for i in range(8)) == named
    assert not folder.exists()
    assert not [*folder.with_name(f".{folder.name}.partial").glob("checkpoint*")]


def test_without_a_pair_to_compare_nothing_is_trained(scored: dict[str, str], tmp_path: Path) -> None:
    """Where there is one candidate, or where all are equally similar; the model in training may yet tell those apart."""
    model = {"data": scored["data"], "model": scored["model"]}
    settings = {"num_candidates": 1, "max_new_tokens": 8, "max_source_length": 24}
    one = decode.run(decode.Config(**model, output=str(tmp_path / "one"), **settings))
    single = score.run(score.Config(**model, candidates=str(one), output=str(tmp_path / "single")))
    equal = score.run(
        score.Config(**model, candidates=str(tmp_path / "decode"), output=str(tmp_path / "equal"), similarity=all_alike)
    )
    for place, why in (
        (single, "every source has one candidate only"),
        (equal, "all candidates of a source are equally similar"),
    ):
        with pytest.raises(CalibeamError, match=f"^there is nothing to calibrate: {why}.*decode.num_candidates"):
            calibrated({**scored, "scored": str(place)}, "nothing")
        assert not (tmp_path / "nothing").exists()
        assert not (tmp_path / ".nothing.partial").exists()
    assert calibrated({**scored, "scored": str(equal)}, "by-current", similarity="current").is_dir()


def all_alike(candidates: Any, target: Any) -> Tensor:
    return torch.zeros(candidates.mask.shape[:-1])


# Which checkpoint is kept


@pytest.mark.parametrize("rate", [3.0, 100.0])
def test_a_run_that_only_makes_it_worse_gives_back_the_start(rate: float, data: Path, model_folder: Make) -> None:
    model = model_folder("t5")
    folder = tune(data, model, "tuned", learning_rate=rate, eval_steps=1)
    assert manifest(folder)["counts"]["best_step"] == 0
    assert "no step was better on validation than the starting point, which is kept unchanged" in manifest(folder)["notes"]
    assert all(torch.equal(weight, weights(model)[name]) for name, weight in weights(folder).items())


def test_a_start_whose_figure_is_not_a_number_can_be_beaten(
    data: Path, model_folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = evaluate.Validation.measure, itertools.count()

    def first_is_nan(self: Any, *wanted: str) -> dict[str, float]:
        return {name: math.nan if not next(calls) else value for name, value in measure(self, *wanted).items()}

    monkeypatch.setattr(evaluate.Validation, "measure", first_is_nan)
    folder = tune(data, model_folder("t5"), "tuned", max_steps=2, eval_steps=1)
    assert manifest(folder)["counts"]["best_step"] > 0


@pytest.mark.parametrize(("select", "better"), [("perplexity", min), ("rouge", max)])
def test_the_best_checkpoint_by_the_selection_metric_is_kept(
    select: str, better: Any, tmp_path: Path, rows_file: Make, model_folder: Make
) -> None:
    """Of a model that learns its rows by heart, so that ROUGE is not 0 throughout."""
    rows = str(rows_file("rows.jsonl", 8))
    data = prepare.run(prepare.Config(output=str(tmp_path / "data"), train=rows, validation=rows, test=rows))
    model = with_dropout(0.0, model_folder("t5"))
    folder = tune(data, model, "tuned", select=select, max_steps=40, eval_steps=10, learning_rate=3e-2)
    seen = {step: figures[select] for step, figures in log(folder, "validation").items()}
    assert list(seen) == [0, 10, 20, 30, 40]
    counts = manifest(folder)["counts"]
    assert counts[f"best_{select}"] == better(seen.values()) == seen[counts["best_step"]]
    assert counts["best_step"] > 0
    kept, config = seq2seq.load(folder / "model", device="cpu"), finetune.Config(data="", model="", output="", **LENGTHS)
    measured = evaluate.Validation(kept, store.read(data, "prepare").examples("validation"), config).measure(select)
    assert measured[select] == pytest.approx(counts[f"best_{select}"], rel=1e-5)


def test_a_calibration_may_choose_by_similarity_in_the_states_of_the_fine_tuned_model(scored: dict[str, str]) -> None:
    """What is logged before the first step is what `score` says of the fine-tuned model's outputs, and the best step is kept."""
    folder = calibrated(scored, "by-similarity", select="similarity", max_steps=4, eval_steps=1, learning_rate=1e-2)
    seen = {step: figures["similarity"] for step, figures in log(folder, "validation").items()}
    counts = manifest(folder)["counts"]
    assert counts["best_similarity"] == max(seen.values()) == seen[counts["best_step"]]
    assert len(set(seen.values())) > 2
    tuned, data = seq2seq.load(Path(scored["model"]), device="cpu"), store.read(scored["data"], "prepare")
    examples, config = data.examples("validation"), calibrate.Config(**scored, output="", **LENGTHS)
    sources, _ = tuned.encode_sources([example.source for example in examples], config.max_source_length)
    search = {"num_candidates": config.select_num_beams, "max_new_tokens": config.max_target_length}
    rows = decode.decode_all(tuned, [example.id for example in examples], sources, search, seed=0, description="")
    compared = score.similarities(
        tuned, SIMILARITIES["decoder"], sources, [example.targets for example in examples], rows, lambda *_: None,
        max_target_length=config.max_target_length, batch_size=3,
    )  # fmt: skip
    assert seen[0] == pytest.approx(sum(values[0] for values in compared) / len(compared), rel=1e-5)


def test_of_several_learning_rates_the_best_on_validation_is_kept(
    scored: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, to the byte, and what each had."""
    rates = {"1e-30": 1e-30, "0.001": 1e-3, "1": 1.0}
    together = {**COMPARED, "learning_rate": tuple(rates.values())}
    folder = calibrated(scored, "several", **together)
    alone = {name: calibrated(scored, f"alone-{name}", **{**COMPARED, "learning_rate": rate}) for name, rate in rates.items()}
    reached = {name: manifest(place)["counts"]["best_perplexity"] for name, place in alone.items()}
    assert min(reached, key=lambda name: reached[name]) == "0.001"
    assert manifest(alone["1"])["counts"]["best_step"] == 0
    for name, place in alone.items():
        assert manifest(folder.with_name(f"several-{rates[name]!r}"))["files"] == manifest(place)["files"]
    found = manifest(folder)
    assert found["files"] == manifest(alone["0.001"])["files"]
    assert found["counts"] == {**manifest(alone["0.001"])["counts"], "learning_rate": 1e-3}
    assert found["settings"]["learning_rate"] == [1e-30, 1e-3, 1.0]
    listed = ", ".join(f"{reached[name]:.4g} with {name}" for name in rates)
    assert found["notes"][-1] == f"learning rate 0.001 was kept, by validation perplexity: {listed}"
    assert "learning rate 0.001 was kept" in " ".join(capsys.readouterr().out.split())
    none = calibrated(scored, "none", **{**together, "learning_rate": (1e-30, 1.0)})
    assert manifest(none)["notes"][-1].startswith(
        "no learning rate was better than the starting point, by validation perplexity: "
    )
    for wrong in ((), (1e-3, 1e-3)):
        with pytest.raises(CalibeamError, match="learning_rate must be one or several different numbers, got"):
            calibrated(scored, "none", learning_rate=wrong)


def test_one_learning_rate_in_a_list_is_one(scored: dict[str, str]) -> None:
    one, same = calibrated(scored, "one", learning_rate=(1e-3,)), calibrated(scored, "same")
    assert manifest(one)["origin"] == manifest(same)["origin"]
    assert not one.with_name("one-0.001").exists()


def test_of_several_learning_rates_one_that_diverges_is_left_out(scored: dict[str, str]) -> None:
    """Cross entropy, weighed by 1e-5 / 1e-40, is too large for float32."""
    rates = {"learning_rate": (1e-40, 1e-3), "reg_weight": None, "regularizer": "cross_entropy"}
    folder = calibrated(scored, "several", **rates)
    assert not [*folder.parent.glob(".several*.partial")]
    assert manifest(folder)["counts"]["learning_rate"] == 1e-3
    assert manifest(folder)["notes"][-1].endswith("with 0.001, none with 1e-40")
    with pytest.raises(CalibeamError, match="the loss is inf at step 1"):
        calibrated(scored, "none", **{**rates, "learning_rate": (1e-40, 1e-41)})


def test_learning_rates_that_were_tried_before_a_stop_are_not_tried_again(
    scored: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, calibrate_one = (1e-3, 1e-4), calibrate._calibrate

    def stopped(config: calibrate.Config, *rest: Any) -> None:
        if config.learning_rate == rates[1]:
            raise KeyboardInterrupt
        calibrate_one(config, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "_calibrate", stopped)
        with pytest.raises(KeyboardInterrupt):
            calibrated(scored, "several/", learning_rate=rates)
    output = Path(scored["data"]).with_name("several")
    assert not output.exists()
    first = output.with_name("several-0.001") / store.MANIFEST
    before = first.read_bytes()
    calibrated(scored, "several/", learning_rate=rates)
    assert first.read_bytes() == before
    assert manifest(output)["counts"]["learning_rate"] in rates


def test_patience_stops_early(data: Path, model_folder: Make) -> None:
    folder = tune(data, model_folder("t5"), "tuned", learning_rate=3.0, max_steps=6, eval_steps=1, patience=2)
    assert manifest(folder)["counts"]["steps"] == 2
    assert "stopped at step 2: 2 validations without improvement" in manifest(folder)["notes"]
    assert list(log(folder, "train")) == [1, 2]


def test_the_log_has_every_step_and_validation(data: Path, model_folder: Make, scored: dict[str, str]) -> None:
    folder = tune(data, model_folder("bart"), "tuned", batch_size=4, max_steps=0, num_train_epochs=1.5, warmup_steps=2)
    assert list(log(folder, "train")) == [1, 2, 3]
    assert list(log(folder, "validation")) == [0, 2, 3]
    assert [figures["learning_rate"] for figures in log(folder, "train").values()] == pytest.approx([0.0, 5e-3, 1e-2])
    assert all(figures["loss"] > 0 for figures in log(folder, "train").values())
    folder = calibrated(scored, "calibrated")
    assert set(log(folder, "train")[1]) == {"loss", "calibration", "regularization", "agreement", "learning_rate"}
    assert all(set(figures) == {"perplexity", "rouge"} for figures in log(folder, "validation").values())
    assert list(log(folder, "train")) == [1, 2]


def test_agreement_in_training_is_what_score_has(scored: dict[str, str]) -> None:
    """The first step has all examples, most of them without a pair, and nothing was trained before it."""
    counts = json.loads((Path(scored["scored"]) / store.MANIFEST).read_text())["counts"]
    folder = calibrated(scored, "calibrated", pairs="all")
    assert counts["likelihood_agrees"] is not None
    assert manifest(folder)["counts"]["examples_without_a_pair"] > 0
    assert log(folder, "train")[1]["agreement"] == pytest.approx(counts["likelihood_agrees"])


def test_a_model_that_is_broken_is_told_by_its_search(data: Path, model_folder: Make) -> None:
    model = seq2seq.load(model_folder("t5"), device="cpu")
    next(model.model.parameters()).data.fill_(math.nan)
    examples = store.read(data, "prepare").examples("validation")
    config = finetune.Config(data=str(data), model="", output="unused", **LENGTHS)
    with pytest.raises(DivergedError, match="the search finds no output for row-10"):
        evaluate.Validation(model, examples, config).measure("rouge")
    with pytest.raises(DivergedError, match="the search finds no output for a"):
        decode.decode_all(model, ["a"], [[5, 1]], {"num_candidates": 2, "max_new_tokens": 4}, seed=0, description="")


def test_a_calibration_shows_what_it_does_as_it_goes(scored: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = calibrated(scored, "calibrated", regularizer="kl", max_steps=0, num_train_epochs=2, batch_size=8)
    lines = " ".join(capsys.readouterr().out.split())
    assert "2 steps of 8 examples, with a validation every 1" in lines
    few = "very few steps (2): for more, lower calibrate.batch_size (8) or raise calibrate.num_train_epochs (2)"
    assert few in lines
    assert few in manifest(folder)["notes"]
    calibrated(scored, "longer", regularizer="none", max_steps=10, batch_size=1)
    assert "very few steps" not in capsys.readouterr().out
    assert re.search(r"step 2: \S+ examples/s loss \S+ agreement \S+ kl \S+ validation perplexity \S+ rouge \S+", lines)


# Weights that are kept


def test_fault_01_weights_that_are_published_are_those_that_were_chosen(
    data: Path, model_folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after those of step 2 were kept and before a checkpoint knew of it; validated again, they are not the best after
    all, as rounding on a GPU may have it."""
    start, steps = model_folder("t5"), {"eval_steps": 1, "save_steps": 1000, "max_steps": 4}
    whole = tune(data, start, "one", **{**steps, "max_steps": 1})
    seen = iter([10.0, 9.0, 8.99, 9.01, 11.0, 12.0])
    keep_log = store.Output.append_log

    def stopped(self: store.Output, record: dict[str, Any]) -> None:
        if record["step"] == 3 and "train" in record and not (self.folder / "stopped").exists():
            (self.folder / "stopped").touch()
            raise KeyboardInterrupt
        keep_log(self, record)

    monkeypatch.setattr(evaluate.Validation, "measure", lambda *_: {"perplexity": next(seen)})
    monkeypatch.setattr(store.Output, "append_log", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(data, start, "chosen", **steps)
    assert {place.name for place in data.with_name(".chosen.partial").glob("best-*")} >= {"best-000000001", "best-000000002"}
    folder = tune(data, start, "chosen", **steps)
    assert manifest(folder)["counts"]["best_step"] == 1
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(folder).items())
    assert {file.name for file in folder.iterdir()} == {"model", "log.jsonl", "stopped", store.MANIFEST}


# Drift


def test_a_run_whose_perplexity_runs_away_stops_and_keeps_the_best(scored: dict[str, str]) -> None:
    """At a learning rate that ruins the model in a step."""
    folder = calibrated(scored, "calibrated", learning_rate=1.0, max_steps=6, eval_steps=2, regularizer="none", max_drift=1.5)
    seen = {step: figures["perplexity"] for step, figures in log(folder, "validation").items()}
    assert list(seen) == [0, 2]
    times = f"{seen[2] / seen[0]:.3g}"
    note = f"stopped at step 2: perplexity on validation is {times} times what it was, above max_drift, which is 1.5"
    assert note in manifest(folder)["notes"]
    assert manifest(folder)["counts"]["best_step"] == 0
    assert all(torch.equal(weight, weights(Path(scored["model"]))[name]) for name, weight in weights(folder).items())


def test_a_perplexity_that_is_no_number_has_run_away() -> None:
    plan, progress = training.Plan(steps=9, every=3, select="rouge", max_drift=4.0), training._Progress()
    progress.judge({"rouge": 0.5, "perplexity": 2.0}, 0, plan)
    assert progress.stop(plan) == ""
    progress.judge({"rouge": 0.6, "perplexity": math.nan}, 3, plan)
    assert "above max_drift" in progress.stop(plan)


def test_a_run_whose_divergence_runs_away_stops_before_the_next_validation(scored: dict[str, str]) -> None:
    folder = calibrated(scored, "calibrated", learning_rate=1.0, reg_weight=0.0, max_steps=6, eval_steps=6, max_drift=1.5)
    assert list(log(folder, "train")) == [1, 2]  # before the first step the divergence is 0
    assert any("e^kl" in note for note in manifest(folder)["notes"])
    assert list(log(calibrated(scored, "free", learning_rate=1.0, reg_weight=0.0, max_steps=3, max_drift=0.0), "train")) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("train", [tune, calibrated])
def test_nothing_holds_a_model_that_was_trained(
    train: Any, data: Path, model_folder: Make, scored: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stage, or learning rate, begins with all the memory; also after one that failed."""
    held, load = list[Any](), seq2seq.load

    def remembered(*arguments: Any, **named: Any) -> Any:
        model = load(*arguments, **named)
        held.append(weakref.ref(model.model))
        return model

    monkeypatch.setattr(seq2seq, "load", remembered)
    gc.collect()
    gc.disable()
    try:
        if train is tune:
            tune(data, model_folder("t5"), "tuned")
        else:
            calibrated(scored, "several", learning_rate=(1e-40, 1e-3), reg_weight=None, regularizer="cross_entropy")
        assert held
        assert not any(model() is not None for model in held)
    finally:
        gc.enable()
