"""Plans are pure: nothing here touches a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibeam import recipe, studies
from calibeam.pipeline import Step
from calibeam.records import CalibeamError
from calibeam.studies.cost import in_line
from calibeam.studies.plan import Row, in_order
from calibeam.studies.walk import Agenda

RECIPE = {
    "output": "out",
    "model": "some/model",
    "prepare": {"task": "samsum", "path": "data/samsum"},
    "finetune": {"num_train_epochs": 5},
    "study": {"learning_rates": [1e-5, 1e-4], "betas": [1.0, 10.0], "alphas": [0.0, 0.5]},
}


def rows(name: str, *settings: str, **tables: Any) -> list[Row]:
    return studies.plan(name, recipe.override({**RECIPE, **tables}, settings))[-1]


def row(name: str, *settings: str, **labels: Any) -> Row:
    return next(row for row in rows(name, *settings) if row.labels.items() >= labels.items())


def of(step: Step, stage: str) -> Any:
    return next(each.config for each in in_line(step) if each.stage == stage)


def settings_of(row: Row) -> tuple[Any, ...]:
    """What the appendix's table of ablation settings has in its columns."""
    step = row.points[0].measured
    decode, calibrate = of(step, "decode"), of(step, "calibrate")
    best = ("lr" if "learning_rate" in row.points[0].tried else "") + ("+beta" if "beta" in row.points[0].tried else "")
    return (
        f"{decode.method} {decode.num_candidates}", of(step, "score").similarity, calibrate.loss, calibrate.regularizer,
        of(step, "finetune").select, best, f"{step.config.methods[0]} {step.config.num_candidates[0]}",
    )  # fmt: skip


APPENDIX = {  # tab:appendix_ablation
    ("similarity", "ROUGE"): ("beam 15", "rouge", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("similarity", "decoder repr"): ("beam 15", "decoder", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("similarity", "token emb"): ("beam 15", "tokens", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("loss", "rank"): ("beam 15", "decoder", "rank", "cross_entropy", "rouge", "lr+beta", "beam 5"),
    ("loss", "margin"): ("beam 15", "decoder", "margin", "cross_entropy", "rouge", "lr+beta", "beam 5"),
    ("loss", "list rank"): ("beam 15", "decoder", "list_rank", "cross_entropy", "rouge", "lr+beta", "beam 5"),
    ("loss", "reward"): ("beam 15", "decoder", "reward", "cross_entropy", "rouge", "lr", "beam 5"),  # it has no beta
    ("regularizer", "none"): ("beam 15", "decoder", "rank", "none", "rouge", "", "beam 5"),
    ("regularizer", "cross entropy"): ("beam 15", "decoder", "rank", "cross_entropy", "rouge", "", "beam 5"),
    ("regularizer", "KL divergence"): ("beam 15", "decoder", "rank", "kl", "rouge", "", "beam 5"),
    ("decoding", "beam search"): ("beam 15", "decoder", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("decoding", "diverse beam"): ("diverse_beam 15", "decoder", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("decoding", "nucleus"): ("nucleus 15", "decoder", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("checkpoint", "ROUGE"): ("beam 15", "decoder", "reward", "cross_entropy", "rouge", "", "beam 5"),
    ("checkpoint", "perplexity"): ("beam 15", "decoder", "reward", "cross_entropy", "perplexity", "", "beam 5"),
}


def test_the_ablation_has_the_settings_of_the_appendix() -> None:
    found = rows("ablation")
    assert found[0].labels == {"group": "", "row": "fine-tuned"}
    assert {tuple(row.labels.values()): settings_of(row) for row in found[1:]} == APPENDIX
    assert {point.measured.config.split for row in found for point in row.points} == {"validation"}


def test_around_the_recipe_one_setting_at_a_time_differs_from_it() -> None:
    plan = {tuple(row.labels.values()): settings_of(row) for row in rows("ablation", "study.around=recipe")[1:]}
    plain = ("beam 15", "decoder", "rank", "kl", "perplexity", "", "beam 5")
    for settings in plan.values():
        assert sum(one != other for one, other in zip(settings[:5], plain, strict=False)) <= 1
    assert plan["loss", "margin"][:5] == ("beam 15", "decoder", "margin", "kl", "perplexity")


def test_the_final_recipe_is_the_recommended_one() -> None:
    tuned, calibrated = rows("final")
    assert settings_of(calibrated) == ("beam 15", "decoder", "rank", "kl", "perplexity", "lr", "beam 10")
    assert of(calibrated.points[0].measured, "calibrate").beta == 10
    assert [point.measured.config.length_alphas for point in tuned.points] == [(0.0,), (0.5,)]
    assert {point.measured.config.split for row in (tuned, calibrated) for point in row.points} == {"test"}
    assert {step.config.split for row in (tuned, calibrated) for step in row.trials} == {"validation"}


def test_the_rows_of_a_group_share_every_step_but_the_last() -> None:
    plan = rows("ablation", 'study.factors=["loss", "regularizer"]')
    stages = [step.stage for step in in_order(point.measured for row in plan for point in row.points)]
    assert [stages.count(stage) for stage in ("prepare", "finetune", "decode", "score")] == [1, 1, 1, 1]
    # 3 losses with 2 rates x 2 betas and one with 2 rates; 3 regularisers at the recipe's own lr 1e-5 and beta 10, where
    # cross entropy is the same as rank's point in the group of losses
    assert stages.count("calibrate") == 3 * 4 + 2 + 3 - 1


def test_two_studies_have_their_common_steps_in_one_place() -> None:
    places = [
        {step.config.output for row in rows(name) for point in row.points for step in in_order([point.measured])}
        for name in ("ablation", "decoding")
    ]
    shared = {Path(place).name.split("-")[0] for place in places[0] & places[1]}
    assert shared == {"prepare", "finetune", "decode", "score", "calibrate", "evaluate"}


def test_of_several_studies_the_first_has_its_steps_first() -> None:
    """And within one, the longest chain of steps."""
    settings = ["study.alphas=[0]", "study.betas=[1]", "study.learning_rates=[1e-4]"]
    final, ablation = rows("final", *settings), rows("ablation", *settings)
    agenda, begun, measured = Agenda([final, ablation]), list[Step](), list[tuple[int, int]]()
    while step := agenda.begin():
        begun.append(step)
        for number, points in agenda.finish(step):
            assert points == [row.points[0] for row in (final, ablation)[number]]
            measured.append((number, len(begun)))
    first = {step.config.output for step in in_order(row.points[0].measured for row in final)}
    assert {step.config.output for step in begun[: len(first)]} == first
    assert [step.stage for step in begun[:3]] == ["prepare", "finetune", "decode"]  # before the fine-tuned model is evaluated
    assert len(begun) == agenda.total > len(first)
    assert measured == [(0, len(first)), (1, agenda.total)]


def test_a_folder_is_named_after_what_is_in_it_alone() -> None:
    def place(*settings: str) -> str:
        return rows("final", *settings)[1].points[0].measured.config.output

    assert place() == place("evaluate.device=cpu", "calibrate.micro_batch_size=2", "study.output=elsewhere")
    assert Path(place("output=moved")).name == Path(place()).name
    assert place("calibrate.max_grad_norm=1") == place("calibrate.max_grad_norm=1.0") == place()
    others = ["calibrate.max_grad_norm=2", "finetune.seed=1", "model=other/model", "prepare.path=data/other", "decode.seed=1"]
    assert len({place(), *map(place, others)}) == 1 + len(others)


def test_every_place_that_a_stage_reads_is_known() -> None:
    """A new setting of that kind has to be named in PLACES, or two inputs would share a folder and be refused."""
    import dataclasses

    from calibeam import stages
    from calibeam.studies.plan import PLACES

    texts = {
        field.name
        for name in stages.STAGES
        for field in dataclasses.fields(stages.load(name).Config)
        if not field.metadata["identity"] and field.type in ("str", "tuple[str, ...]")
    }
    assert texts - PLACES <= {"output", "device", "engine", "before", "after", "calibrated", "report_to"}


def test_tasks_by_name_have_their_lengths_and_their_path() -> None:
    plan = rows("final", 'study.tasks=["webnlg_en", "commongen"]', prepare={"path": "data/{task}"})
    assert list(dict.fromkeys(row.task for row in plan)) == ["webnlg_en", "commongen"]
    found = plan[-1].points[0].measured
    assert (of(found, "prepare").task, of(found, "prepare").path) == ("commongen", "data/commongen")
    assert [of(found, stage).max_source_length for stage in ("finetune", "decode", "calibrate", "evaluate")] == [64] * 4
    assert (of(found, "decode").max_new_tokens, of(found, "score").max_target_length) == (64, 64)


def test_a_recipe_wins_over_a_tasks_lengths_and_a_tasks_table_over_the_recipe() -> None:
    tasks = ["study.tasks={samsum={calibrate={beta=3.0}}, xsum={}}", "prepare.path=data/{task}"]
    plan = rows("length", *tasks, "evaluate.max_source_length=99")
    assert {row.points[0].measured.config.max_source_length for row in plan} == {99}
    plan = rows("ablation", *tasks, "calibrate.beta=2.0", 'study.factors=["similarity"]')
    assert {row.task: of(row.points[0].measured, "calibrate").beta for row in plan[1:] if row.against} == {"samsum": 3, "xsum": 2}


def test_no_fine_tuning_no_choice_of_its_checkpoint() -> None:
    plan = studies.plan("ablation", {key: value for key, value in RECIPE.items() if key != "finetune"})[-1]
    assert "checkpoint" not in {row.labels["group"] for row in plan}
    assert all(step.stage != "finetune" for row in plan for step in in_order([row.points[0].measured]))


def test_alpha_is_chosen_by_the_fine_tuned_model_in_both_rows_of_length() -> None:
    both = row("length", slic="yes", alpha="yes")
    assert [point.tried for point in both.points][:3] == [
        {"learning_rate": 1e-5, "beta": 1.0, "alpha": 0.0},
        {"learning_rate": 1e-5, "beta": 1.0, "alpha": 0.5},
        {"learning_rate": 1e-5, "beta": 10.0, "alpha": 0.0},
    ]
    calibrated, tuned = both.points[1].trials
    assert (tuned.config.length_alphas, calibrated.config.length_alphas) == ((0.5,), (0.0,))
    assert "calibrate" in {step.stage for step in in_line(calibrated)}
    assert "calibrate" not in {step.stage for step in in_line(tuned)}


def test_a_preset_lies_under_a_study() -> None:
    found = next(row for row in rows("ablation", "study.around=recipe", preset="brio") if row.labels["row"] == "token emb")
    assert settings_of(found)[:4] == ("diverse_beam 16", "tokens", "list_rank_mean", "cross_entropy")
    beam = next(row for row in rows("ablation", "study.around=recipe", preset="brio") if row.labels["row"] == "beam search")
    assert of(beam.points[0].measured, "decode").diversity == 0.0


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_row_has_labels_of_its_own_and_a_row_to_be_compared_with(name: str) -> None:
    found = rows(name, 'study.tasks=["samsum", "xsum"]', prepare={})
    labels = [(row.task, *row.labels.values()) for row in found]
    assert len(set(labels)) == len(labels)
    assert all(row.against is None or (row.task, *row.against.values()) in labels for row in found)


@pytest.mark.parametrize("name", studies.STUDIES)
def test_the_papers_recipe_can_be_planned(name: str) -> None:
    tables = recipe.read(Path(__file__).parents[2] / "recipes" / "paper.toml")
    found = studies.plan(name, tables)[-1]
    assert {row.task for row in found} == {"cnn_dailymail", "xsum", "reddit_tifu_long", "samsum"}
    assert of(found[-1].points[0].measured, "calibrate").batch_size == 64
    assert of(found[-1].points[0].measured, "finetune").batch_size == 512


def test_the_learning_rate_that_a_recipe_names_is_the_one_tried() -> None:
    tables = {key: value for key, value in RECIPE.items() if key != "study"}
    assert [point.tried["learning_rate"] for point in studies.plan("final", tables)[-1][1].points] == [1e-6, 3e-6, 1e-5]
    (point,) = studies.plan("final", {**tables, "calibrate": {"learning_rate": 3e-4}})[-1][1].points
    assert (of(point.measured, "calibrate").learning_rate, point.trials) == (3e-4, ())
    several = {**tables, "calibrate": {"learning_rate": [1e-5, 1e-4]}}
    assert [of(point.measured, "calibrate").learning_rate for point in studies.plan("final", several)[-1][1].points] == [
        1e-5,
        1e-4,
    ]
    held = [row for row in studies.plan("ablation", several)[-1] if row.labels.get("group") == "similarity"]
    assert {of(row.points[0].measured, "calibrate").learning_rate for row in held} == {(1e-5, 1e-4)}


def test_beta_is_the_recipes_own_for_its_own_loss_around_the_recipe() -> None:
    tables = {**RECIPE, "study": {"around": "recipe"}, "calibrate": {"beta": 2.0, "learning_rate": 1e-5}}
    plan = {tuple(row.labels.values()): row.points for row in studies.plan("ablation", tables)[-1]}
    assert [of(point.measured, "calibrate").beta for point in plan["loss", "rank"]] == [2.0]
    assert [point.tried["beta"] for point in plan["loss", "margin"]] == [0.1, 1.0, 10.0]
    assert not plan["loss", "reward"][0].tried
    plan = {tuple(row.labels.values()): row.points for row in studies.plan("ablation", {**tables, "study": {}})[-1]}
    assert [point.tried["beta"] for point in plan["loss", "rank"]] == [0.1, 1.0, 10.0]


def test_a_study_may_have_a_table_of_its_own() -> None:
    tasks = {"samsum": {"calibrate": {"beta": 3.0}}, "xsum": {}}
    own = {"decoding": {"tasks": ["samsum"], "calibrated_on": ["beam"]}, "final": {"split": "validation"}}
    tables = {**RECIPE, "prepare": {"path": "data/{task}"}, "study": {"tasks": tasks, "num_candidates": [1, 2], **own}}
    decoding, final, length = (studies.plan(name, tables)[-1] for name in ("decoding", "final", "length"))
    assert {(row.task, row.labels["model"]) for row in decoding} == {
        ("samsum", "fine-tuned"), ("samsum", "fine-tuned, alpha"), ("samsum", "calibrated on beam"),
    }  # fmt: skip
    assert of(decoding[-1].points[0].measured, "calibrate").beta == 3.0
    assert {row.task for row in final} == {row.task for row in length} == {"samsum", "xsum"}
    assert {row.points[0].measured.config.split for row in final} == {"validation"}
    with pytest.raises(CalibeamError, match=r"study\.final must be a table"):
        studies.plan("final", {**RECIPE, "study": {"final": 3}})


def test_a_task_by_name_is_not_read_from_the_files_of_the_recipe() -> None:
    files = {"train": "a.jsonl", "validation": "b.jsonl"}
    found = of(rows("final", 'study.tasks=["xsum"]', prepare=files)[0].points[0].measured, "prepare")
    assert (found.task, found.train, found.validation) == ("xsum", "", "")
    with pytest.raises(CalibeamError, match=r"write \{task\} for its name"):
        rows("final", 'study.tasks=["xsum", "samsum"]')
    kept = rows("final", 'study.tasks={samsum={}, xsum={prepare={path="elsewhere"}}}')
    assert [of(row.points[0].measured, "prepare").path for row in kept[::2]] == ["data/samsum", "elsewhere"]
