"""Recipes: what overrides what, and what is said about a mistake."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calibeam import functions, pipeline, recipe
from calibeam.records import CalibeamError
from calibeam.stages import calibrate, decode, evaluate, load, prepare, score

PLACES = {"output": "out", "data": "data", "model": "model"}


def decode_config(**values: Any) -> Any:
    return recipe.build(decode.Config, "decode", {**PLACES, **values})


def steps_of(**tables: Any) -> dict[str, Any]:
    """The plan's settings by output folder."""
    return {step.config.output: step.config for step in pipeline.plan({"output": "run", **tables})}


# What overrides what


def test_a_setting_comes_from_the_default_then_the_table_then_the_override(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[decode]\nnum_candidates = 7\nmax_new_tokens = 20\n")
    tables = recipe.override(recipe.read(file), ["max_new_tokens=30"], table="decode")
    config = decode_config(**tables["decode"])
    assert (config.max_source_length, config.num_candidates, config.max_new_tokens) == (512, 7, 30)


def test_the_last_of_two_overrides_counts_and_the_tables_given_stay_as_they_were() -> None:
    tables = {"decode": {"seed": 1}}
    assert recipe.override(tables, ["decode.seed=2", "decode.seed=3"]) == {"decode": {"seed": 3}}
    assert tables == {"decode": {"seed": 1}}


# key=value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 5]", [1, 5]),
        ('["a", "b"]', ["a", "b"]),
        ('"7"', "7"),
        ("'in quotes'", "in quotes"),
        ("out/data", "out/data"),
        ("/abs/train.jsonl.gz", "/abs/train.jsonl.gz"),
        ("google-t5/t5-small", "google-t5/t5-small"),
        ("two words", "two words"),
        ("summarize: ", "summarize: "),
        ("a=b", "a=b"),
        ("ünïcode", "ünïcode"),
        ("", ""),
    ],
)
def test_a_value_is_toml_or_else_the_text_itself(text: str, value: Any) -> None:
    result = recipe.override({}, [f"key={text}"])["key"]
    assert result == value
    assert type(result) is type(value)


def test_a_bare_key_belongs_to_the_stage_and_a_dotted_one_to_the_table_it_names() -> None:
    assert recipe.override({}, ["seed=1", "score.device=cpu"], table="decode") == {
        "decode": {"seed": 1},
        "score": {"device": "cpu"},
    }
    assert recipe.override({}, ["model=m", "decode.seed=1"]) == {"model": "m", "decode": {"seed": 1}}


@pytest.mark.parametrize("assignment", ["seed", "", "=3", " = 3"])
def test_what_is_not_key_value_is_refused(assignment: str) -> None:
    with pytest.raises(CalibeamError, match=re.escape(f"{assignment!r} is not key=value")):
        recipe.override({}, [assignment])


def test_a_key_inside_something_that_is_no_table_is_refused() -> None:
    with pytest.raises(CalibeamError, match=r"^model\.size: model is not a table$"):
        recipe.override({"model": "m"}, ["model.size=3"])


# Keys, types, ranges, choices


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("num_candidate", "unknown key decode.num_candidate; did you mean num_candidates?"),
        ("topp", "unknown key decode.topp; did you mean top_p?"),
        ("zzz", "unknown key decode.zzz; known are batch_size, data, device, "),
    ],
)
def test_fault_43_an_unknown_key_is_refused_with_the_nearest_one(key: str, message: str) -> None:
    with pytest.raises(CalibeamError, match="^" + re.escape(message)):
        decode_config(**{key: 1})


def test_needed_keys_that_are_missing_are_named() -> None:
    with pytest.raises(CalibeamError, match=r"^decode needs output and model$"):
        recipe.build(decode.Config, "decode", {"data": "d"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_candidates", "15", "decode.num_candidates must be a whole number, got '15'"),
        ("num_candidates", True, "decode.num_candidates must be a whole number, got True"),
        ("num_candidates", 15.0, "decode.num_candidates must be a whole number, got 15.0"),
        ("groups", "two", "decode.groups must be a whole number or nothing, got 'two'"),
        ("top_p", "0.9", "decode.top_p must be a number, got '0.9'"),
        ("top_p", False, "decode.top_p must be a number, got False"),
        ("method", ["beam"], "decode.method must be a string, got ('beam',)"),
        ("device", 0, "decode.device must be a string, got 0"),
    ],
)
def test_fault_43_a_value_of_the_wrong_type_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(CalibeamError) as error:
        decode_config(**{key: value})
    assert str(error.value) == message


@pytest.mark.parametrize("value", [3, ["source", 3]])
def test_a_list_must_be_one_and_have_items_of_its_type(value: Any) -> None:
    with pytest.raises(CalibeamError, match=r"^prepare\.target_columns must be a list, each a string, got "):
        recipe.build(prepare.Config, "prepare", {"output": "out", "target_columns": value})


def test_a_list_of_lists_is_no_list_without_brackets() -> None:
    with pytest.raises(CalibeamError, match=r"must be a list, each a number, got \(\[1, 5\],\)$"):
        recipe.build(evaluate.Config, "evaluate", {**PLACES, "length_alphas": [[1, 5]]})


def test_a_list_from_python_is_one() -> None:
    config = evaluate.Config(**PLACES, num_candidates=[1, 3])
    assert config.num_candidates == (1, 3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(CalibeamError, match=f"^evaluate.diversity must be a finite number, got {value}$"):
        recipe.build(evaluate.Config, "evaluate", {**PLACES, "diversity": value})


def test_one_item_will_do_for_a_list() -> None:
    given = {"num_candidates": 3, "methods": "nucleus", "metrics": "gem", "length_alphas": 1}
    config = recipe.build(evaluate.Config, "evaluate", {**PLACES, **given})
    assert (config.num_candidates, config.methods, config.metrics, config.length_alphas) == ((3,), ("nucleus",), ("gem",), (1,))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_candidates", "1,5", "evaluate.num_candidates must be a list, each a whole number, got '1,5'; write it as [1,5]"),
        ("metrics", "gem,squad_qg", 'got \'gem,squad_qg\'; write several as ["gem", "squad_qg"]'),
    ],
)
def test_how_a_list_is_written_is_said(key: str, value: str, message: str) -> None:
    with pytest.raises(CalibeamError) as error:
        recipe.build(evaluate.Config, "evaluate", {**PLACES, key: value})
    assert str(error.value).endswith(message)


def test_a_whole_number_will_do_for_a_number_and_a_list_for_a_tuple() -> None:
    assert decode_config(method="nucleus", top_p=1).top_p == 1
    config = recipe.build(evaluate.Config, "evaluate", {**PLACES, "num_candidates": [2, 4], "length_alphas": [0, 0.5]})
    assert (config.num_candidates, config.length_alphas) == ((2, 4), (0, 0.5))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("top_p", 1.5, "decode.top_p must be at most 1, got 1.5"),
        ("top_p", 0, "decode.top_p must be above 0, got 0"),
        ("top_p", float("nan"), "decode.top_p must be a finite number, got nan"),
        ("num_candidates", 0, "decode.num_candidates must be at least 1, got 0"),
        ("diversity", -0.1, "decode.diversity must be at least 0, got -0.1"),
        ("method", "nuclues", "decode.method must be one of beam, diverse_beam, nucleus, got 'nuclues'; did you mean 'nucleus'?"),
        ("method", "zzz", "decode.method must be one of beam, diverse_beam, nucleus, got 'zzz'"),
        ("diversity", 0.5, "decode.diversity belongs to method='diverse_beam'"),
    ],
)
def test_fault_43_a_value_out_of_range_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(CalibeamError) as error:
        decode_config(**{key: value})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_candidates", [1, 0], "evaluate.num_candidates must be at least 1, got 0"),
        ("methods", ["beam", "bean"], "evaluate.methods must be one of beam, diverse_beam, nucleus, got 'bean'"),
    ],
)
def test_fault_43_every_item_of_a_list_must_be_in_range(key: str, value: Any, message: str) -> None:
    with pytest.raises(CalibeamError, match="^" + re.escape(message)):
        recipe.build(evaluate.Config, "evaluate", {**PLACES, key: value})


TRAINING = {**PLACES, "scored": "scored"}


@pytest.mark.parametrize(
    ("stage", "values", "message"),
    [
        (calibrate, {"betta": 1}, "unknown key calibrate.betta; did you mean beta?"),
        (calibrate, {"beta": "ten"}, "calibrate.beta must be a number, got 'ten'"),
        (calibrate, {"beta": -1}, "calibrate.beta must be at least 0, got -1"),
        (calibrate, {"loss": "rnak"}, "did you mean 'rank'?"),
        (decode, {"method": "nucleus", "top_p": 1.5}, "decode.top_p must be at most 1, got 1.5"),
        (decode, {"method": "diverse_beam", "num_candidates": 15, "groups": 4}, "groups"),
        (decode, {"method": "diverse_beam", "num_candidates": 2, "groups": 3}, "groups"),
        (decode, {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        (evaluate, {"newline": ""}, "evaluate.newline must not be empty"),
        (prepare, {"task": "samsun"}, "prepare.task must be one of docstrings, cnn_dailymail, "),
        (prepare, {"task": "samsun"}, "did you mean 'samsum'?"),
        (prepare, {"bad_rows": "skipp"}, "did you mean 'skip'?"),
    ],
)
def test_fault_43_wrong_settings_of_every_kind_are_refused(stage: Any, values: dict[str, Any], message: str) -> None:
    places = {"output": "out"} if stage is prepare else TRAINING if stage is calibrate else PLACES
    with pytest.raises(CalibeamError) as error:
        recipe.build(stage.Config, stage.__name__.rsplit(".", 1)[-1], {**places, **values})
    assert message in str(error.value)


def test_a_config_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(CalibeamError, match=r"^num_candidates must be at least 1, got 0$"):
        decode.Config(**PLACES, num_candidates=0)


def my_similarity() -> None: ...


def test_a_function_of_ones_own_is_a_choice_and_is_recorded_by_its_identity() -> None:
    config = score.Config(**PLACES, candidates="c", similarity=my_similarity)
    assert config.similarity is my_similarity
    recorded = functions.identity(my_similarity)
    assert config.identity()["similarity"] == config.resolved()["similarity"] == recorded
    assert calibrate.Config(**PLACES, scored="s", loss=my_similarity).resolved()["loss"] == recorded
    assert evaluate.Config(**PLACES, metrics=("gem", my_similarity)).identity()["metrics"] == ["gem", recorded]


NAMED = [
    ("score", "similarity", f"{__name__}:my_similarity"),
    ("calibrate", "loss", f"{__name__}:my_similarity"),
    ("evaluate", "metrics", ["rouge", f"{__name__}:my_similarity"]),
]


@pytest.mark.parametrize(("stage", "key", "value"), NAMED)
def test_a_function_is_named_by_what_is_typed_with_the_flag_and_by_nothing_else(stage: str, key: str, value: Any) -> None:
    """Neither a recipe, whatever else is allowed, nor a line without the flag."""
    config_class, places = load(stage).Config, {**PLACES, **({"candidates": "c"} if stage == "score" else {})}
    places |= {"scored": "s"} if stage == "calibrate" else {}
    line = f"{stage}.{key}={json.dumps(value)}"
    in_a_recipe = tomllib.loads(f"[{stage}]\n{key} = {json.dumps(value)}")
    typed = recipe.override({stage: places}, [line], allow_code=True)[stage]
    built = recipe.build(config_class, stage, typed)
    assert my_similarity in (getattr(built, key), *(getattr(built, key) if isinstance(value, list) else ()))
    for tables in (
        {stage: {**places, **in_a_recipe[stage]}},
        recipe.override({stage: {**places, **in_a_recipe[stage]}}, [f"{stage}.output=elsewhere"], allow_code=True),
        recipe.override({stage: places}, [line]),
    ):
        with pytest.raises(CalibeamError, match=f"{stage}.{key} must be one of .*module:function .* with --allow-code"):
            recipe.build(config_class, stage, tables[stage])


def test_a_typed_value_of_another_setting_is_plain_text() -> None:
    tables = recipe.override({}, ["decode.data=os:getcwd", "decode.model=m", "decode.output=o"], allow_code=True)
    assert recipe.build(decode.Config, "decode", tables["decode"]).data == "os:getcwd"


def test_bertscore_needs_an_encoder_and_a_baseline_of_three() -> None:
    for config in (
        lambda **more: score.Config(**PLACES, candidates="c", similarity="bertscore", **more),
        lambda **more: evaluate.Config(**PLACES, metrics=("bertscore",), **more),
    ):
        with pytest.raises(CalibeamError, match="bertscore_model must name an encoder"):
            config()
        with pytest.raises(CalibeamError, match=r"bertscore_baseline must be P, R and F, each below 1, got \[0\.8\]"):
            config(bertscore_model="m", bertscore_baseline=(0.8,))
        assert config(bertscore_model="m").uses_bertscore
    assert not evaluate.Config(**PLACES).uses_bertscore


def test_the_identity_leaves_out_places_devices_and_batch_sizes() -> None:
    identity = decode_config(device="cpu").identity()
    assert identity["num_candidates"] == 15
    assert not {"output", "data", "model", "device", "batch_size"} & set(identity)


# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^no recipe at .*recipe\.toml$"),
        (b"[decode\nseed = 1\n", r"recipe\.toml is not valid TOML: .*line 1"),
        (b"model = google-t5/t5-small\n", r"is not valid TOML: Invalid value \(at line 1.*\) \(text needs quotes\)$"),
        (b"model = 'caf\xe9'\n", r"recipe\.toml cannot be read: .*utf-8"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "recipe.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CalibeamError, match=message):
        recipe.read(file)


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match="cannot be read"):
        recipe.read(tmp_path)


# Tables


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"ouput": "x"}, "unknown key ouput; did you mean output?"),
        ({"calibrat": {}}, "unknown key calibrat; did you mean calibrate?"),
        ({"decode": 3}, "decode is a stage: write its settings in a table [decode]"),
        ({"finetune": "yes"}, "finetune is a stage: write its settings in a table [finetune]"),
        ({"output": 3}, "output must be a string, got 3"),
        ({"model": {}}, "model must be a string, got {}"),
        ({"max_source_length": "64"}, "max_source_length must be a whole number, got '64'"),
        ({"learning_rate": 1e-4}, "unknown key learning_rate; did you mean calibrate.learning_rate?"),
        (
            {"finetune": {}, "learning_rate": 1e-4},
            "unknown key learning_rate; did you mean finetune.learning_rate or calibrate.learning_rate?",
        ),
    ],
)
def test_the_top_of_a_recipe_is_checked(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibeamError) as error:
        pipeline.check_tables(tables)
    assert str(error.value) == message


# The plan


def test_without_finetune_the_model_is_used_as_it_is() -> None:
    steps = steps_of(model="m")
    assert list(steps) == [
        "run/prepare", "run/decode", "run/score", "run/calibrate",
        "run/evaluate/finetuned", "run/evaluate/calibrated", "run/report", "run/model",
    ]  # fmt: skip
    decoding, scoring, training = steps["run/decode"], steps["run/score"], steps["run/calibrate"]
    assert (decoding.data, decoding.model) == ("run/prepare", "m")
    assert (scoring.data, scoring.model, scoring.candidates) == ("run/prepare", "m", "run/decode")
    assert (training.data, training.model, training.scored) == ("run/prepare", "m", "run/score")
    before, after = steps["run/evaluate/finetuned"], steps["run/evaluate/calibrated"]
    assert (before.model, before.reference) == ("m", "")
    assert (after.model, after.reference) == ("run/calibrate", "m")
    for last in (steps["run/report"], steps["run/model"]):
        assert (last.before, last.after, last.calibrated) == (
            "run/evaluate/finetuned",
            "run/evaluate/calibrated",
            "run/calibrate",
        )


def test_with_finetune_all_later_stages_use_what_it_writes() -> None:
    steps = steps_of(model="m", finetune={})
    assert list(steps)[:3] == ["run/prepare", "run/finetune", "run/decode"]
    assert steps["run/finetune"].model == "m"
    later = ["run/decode", "run/score", "run/calibrate", "run/evaluate/finetuned"]
    assert [steps[name].model for name in later] == ["run/finetune"] * 4
    assert steps["run/evaluate/calibrated"].reference == "run/finetune"


def test_with_create_no_model_is_needed_and_finetune_begins_with_it() -> None:
    steps = steps_of(create={}, finetune={})
    assert list(steps)[:3] == ["run/prepare", "run/create", "run/finetune"]
    assert steps["run/create"].data == "run/prepare"
    assert steps["run/finetune"].model == "run/create"
    assert steps["run/decode"].model == "run/finetune"
    assert steps_of(create={})["run/decode"].model == "run/create"


def test_with_a_vocabulary_and_pretraining_each_begins_with_the_one_before() -> None:
    corpus = {"files": ["a.txt"]}
    steps = steps_of(tokenizer=corpus, create={"size": "base"}, pretrain={**corpus, "max_steps": 1}, finetune={})
    assert list(steps)[:5] == [f"run/{name}" for name in ("prepare", "tokenizer", "create", "pretrain", "finetune")]
    assert (steps["run/create"].tokenizer, steps["run/create"].data) == ("run/tokenizer", "")
    assert (steps["run/pretrain"].model, steps["run/finetune"].model) == ("run/create", "run/pretrain")
    assert steps_of(create={"tokenizer": "t"})["run/create"].data == ""
    assert steps_of(model="m", pretrain={**corpus, "max_steps": 1})["run/decode"].model == "run/pretrain"


def test_a_plan_needs_a_model_and_an_output() -> None:
    with pytest.raises(CalibeamError, match=r"^the recipe needs model: a folder or a Hugging Face Hub id"):
        pipeline.plan({"output": "run"})
    with pytest.raises(CalibeamError, match=r"^the recipe needs output"):
        pipeline.plan({"model": "m"})


def test_a_mistake_in_the_last_table_is_found_before_anything_runs(tmp_path: Path) -> None:
    tables = {"output": str(tmp_path / "run"), "model": "m", "evaluate": {"top_p": 2}}
    with pytest.raises(CalibeamError, match=r"^evaluate\.top_p must be at most 1, got 2$"):
        pipeline.run(tables)
    assert not (tmp_path / "run").exists()


def test_lengths_at_the_top_are_those_of_every_stage_that_reads_examples_and_says_nothing_else() -> None:
    pretraining = {"files": ["a.txt"], "max_steps": 1}
    lengths = {"max_source_length": 96, "max_target_length": 12}
    steps = steps_of(model="m", **lengths, pretrain=pretraining, finetune={}, decode={"max_new_tokens": 9})
    names = ("max_source_length", "max_target_length", "max_new_tokens")
    found = {place: tuple(getattr(config, name, None) for name in names) for place, config in steps.items()}
    both = (96, 12, None)
    assert found == {
        "run/prepare": (None,) * 3, "run/pretrain": (512, 256, None), "run/finetune": both, "run/decode": (96, None, 9),
        "run/score": (None, 12, None), "run/calibrate": both, "run/evaluate/finetuned": (96, 12, 12),
        "run/evaluate/calibrated": (96, 12, 12), "run/report": (None,) * 3, "run/model": (None,) * 3,
    }  # fmt: skip
    (alone,) = pipeline.plan({"output": "run", "model": "m", **lengths}, only="decode")
    assert (alone.config.max_source_length, alone.config.max_new_tokens) == (96, 12)


def test_device_and_type_at_the_top_are_those_of_every_stage_that_runs_a_model_and_says_nothing_else() -> None:
    pretraining = {"files": ["a.txt"], "max_steps": 1}
    steps = steps_of(model="m", device="cpu", dtype="bfloat16", pretrain=pretraining, score={"dtype": "float32"})
    found = {place: (getattr(config, "device", None), getattr(config, "dtype", None)) for place, config in steps.items()}
    both, neither = ("cpu", "bfloat16"), (None, None)
    assert found == {
        "run/prepare": neither, "run/pretrain": both, "run/decode": both, "run/score": ("cpu", "float32"), "run/calibrate": both,
        "run/evaluate/finetuned": both, "run/evaluate/calibrated": both, "run/report": neither, "run/model": neither,
    }  # fmt: skip
    with pytest.raises(CalibeamError, match=r"^dtype must be a string, got 16$"):
        pipeline.plan({"output": "run", "model": "m", "dtype": 16})
    with pytest.raises(CalibeamError, match=r"^dtype must be one of auto, float32, bfloat16, got 'bf16'"):
        pipeline.plan({"output": "run", "model": "m", "dtype": "bf16"})
    with pytest.raises(CalibeamError, match=r"^score\.device must be one of auto, cpu, cuda, got 'gpu'"):
        pipeline.plan({"output": "run", "model": "m", "score": {"device": "gpu"}})


def test_one_candidate_leaves_nothing_to_calibrate() -> None:
    tables = {"output": "run", "model": "m", "decode": {"num_candidates": 1}}
    with pytest.raises(CalibeamError, match=r"^decode\.num_candidates is 1, but calibrate compares .*--num-candidates\)$"):
        pipeline.plan(tables)
    assert pipeline.plan(tables, only="decode")
    assert pipeline.plan({**tables, "calibrate": {"loss": my_similarity}})  # a loss of one's own may do with one


def test_a_table_may_put_its_stage_elsewhere_or_read_from_elsewhere() -> None:
    steps = steps_of(model="m", export={"output": "my-model"}, decode={"data": "other"})
    assert "my-model" in steps
    assert "run/model" not in steps
    assert steps["run/decode"].data == "other"


def test_evaluation_into_one_folder_of_its_own_is_one_step() -> None:
    tables = {"output": "run", "model": "m", "evaluate": {"output": "ev", "model": "other"}}
    steps = pipeline.plan(tables, only="evaluate")
    assert [(step.config.output, step.config.model) for step in steps] == [("ev", "other")]
    with pytest.raises(CalibeamError, match="evaluates two models"):
        pipeline.plan(tables)


def test_a_stage_that_was_put_elsewhere_is_read_from_there() -> None:
    assert steps_of(model="m", prepare={"output": "elsewhere"})["run/decode"].data == "elsewhere"


def test_two_stages_that_would_write_one_folder_are_refused() -> None:
    with pytest.raises(CalibeamError, match="same"):
        pipeline.plan({"output": "run", "model": "m", "prepare": {"output": "same"}, "decode": {"output": "same"}})


def test_running_a_stage_that_was_not_asked_for_is_an_error() -> None:
    with pytest.raises(CalibeamError, match=r"^the recipe has no \[finetune\] table$"):
        pipeline.run({"output": "run", "model": "m"}, only="finetune")
