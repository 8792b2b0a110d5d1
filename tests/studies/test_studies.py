"""All five studies on a model that learns in a second, as a user starts them; the first is stopped on its way."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calibeam import recipe, store, studies
from calibeam.cli import app
from calibeam.records import CalibeamError
from calibeam.stages import prepare
from calibeam.studies import results
from conftest import TINY_RECIPE, sentence

RECIPE = f"""{TINY_RECIPE}[finetune]
learning_rate = 1e-2
batch_size = 16
max_steps = 90
max_source_length = 24
max_target_length = 8
eval_steps = 90
[decode]
num_candidates = 3
max_new_tokens = 8
max_source_length = 24
[calibrate]
learning_rate = 1e-2
batch_size = 16
max_steps = 2
max_source_length = 24
max_target_length = 8
[evaluate]
max_new_tokens = 8
max_source_length = 24
max_target_length = 8
[study]
factors = ["similarity", "checkpoint"]
learning_rates = [1e-3, 1e-2]
betas = [1.0]
alphas = [0.0, 1.0]
num_candidates = [1, 2]
num_beams = 2
calibrated_num_beams = 3
models.tiny.create.ffn_dim = 32
models.wide.create.ffn_dim = 64
"""
ONE_RATE = "study.learning_rates=[1e-2]"
SETTINGS = {  # scaling is of two models, the others of the first
    "final": ['study.tasks={plain={}, other={prepare={train="other.jsonl"}}}', ONE_RATE],
    "ablation": ["calibrate.learning_rate=[1e-2, 1e-3]"],
    "decoding": ["study.alphas=[0]"],
    "length": [ONE_RATE],
    "scaling": ["study.num_candidates=[2]", "study.alphas=[0]", ONE_RATE],
}


def tables(name: str, *settings: str) -> dict[str, Any]:
    return recipe.override(recipe.read(Path("recipe.toml")), [*SETTINGS[name], *settings])


def write_rows(file: Path, first: int, count: int) -> None:
    sources = [sentence(i, 4) for i in range(first, first + count)]
    file.write_text("".join(json.dumps({"source": s, "target": f"the {s.split()[0]} ran over"}) + "\n" for s in sources))


def manifests(root: Path) -> dict[str, bytes]:
    """A manifest holds the time at which its folder was made."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob(store.MANIFEST)}


def steps(root: Path = Path("out")) -> Counter[str]:
    return Counter(file.parent.name.rsplit("-", 1)[0] for file in (root / "steps").glob(f"*/{store.MANIFEST}"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where all studies ran. The first had to stop after its first calibration, and was started again."""
    folder = tmp_path_factory.mktemp("studies")
    for name, first, count in (("train", 0, 32), ("other", 40, 32), ("validation", 100, 12)):
        write_rows(folder / f"{name}.jsonl", first, count)
    (folder / "recipe.toml").write_text(RECIPE)
    here = os.getcwd()
    os.chdir(folder)
    try:
        _, _, rows = studies.plan("final", tables("final"))
        obstacle = Path(rows[1].points[0].measured.config.output) / "something else"
        obstacle.parent.mkdir(parents=True)
        obstacle.touch()
        with pytest.raises(CalibeamError, match="is in use"):
            studies.run("final", tables("final"))
        (folder / "kept").write_text(json.dumps({name: content.decode() for name, content in manifests(folder).items()}))
        shutil.rmtree(obstacle.parent)
        for name in SETTINGS:
            studies.run(name, tables(name))
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def records(name: str) -> list[dict[str, Any]]:
    return studies.read(Path("out") / name)


def r_m_of(step: str) -> float:
    return json.loads((Path("out/steps") / step / "results.json").read_text())["settings"][0]["r_m"]


def test_a_study_goes_on_where_it_stopped(there: Path) -> None:
    kept, now = json.loads((there / "kept").read_text()), manifests(there)
    assert {name.split("/")[-2].split("-")[0] for name in kept} >= {
        "prepare",
        "create",
        "finetune",
        "decode",
        "score",
        "calibrate",
    }
    assert "out/final/manifest.json" not in kept
    assert {name: now[name].decode() for name in kept} == kept


def test_rows_and_studies_share_what_they_have_in_common(there: Path) -> None:
    """Counted by hand, over all five studies:

    prepare: two datasets. create: the tiny model for each, and the wide one. finetune: by ROUGE, the tiny and the wide; by
    perplexity, two datasets for `final`, one of them that of `checkpoint`. decode: each of these four by beam, and nucleus for
    `decoding`. score: a decoder similarity for each of these five, and two other similarities.
    """
    found = steps()
    assert {stage: found[stage] for stage in ("prepare", "create", "finetune", "decode", "score")} == {
        "prepare": 2, "create": 3, "finetune": 4, "decode": 5, "score": 7,
    }  # fmt: skip


@pytest.mark.parametrize("name", studies.STUDIES)
def test_a_study_writes_a_table_and_a_figure(name: str, there: Path) -> None:
    folder = store.read(Path("out") / name, "study").path
    made = records(name)
    assert made
    with (folder / "table.csv").open() as file:
        assert [line["task"] for line in csv.DictReader(file)] == [record["task"] for record in made]
    markdown = (folder / "table.md").read_text()
    measured = [record for record in made if "rouge1" in record]
    assert all(f"{one['rouge1']:.2f}/{one['rouge2']:.2f}/{one['rougeLsum']:.2f}" in markdown for one in measured)
    assert all(one["r_m_low"] <= one["r_m"] <= one["r_m_high"] for one in measured)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()


def test_the_model_learnt_something_or_all_of_this_is_of_zeros(there: Path) -> None:
    assert all(record["r_m"] > 10 for record in records("ablation"))
    assert len({record["r_m"] for record in records("decoding")}) > 3


@pytest.mark.parametrize("name", ["final", "length"])
def test_the_best_on_validation_is_measured(name: str, there: Path) -> None:
    _, _, rows = studies.plan(name, tables(name))
    assert any(row.is_open for row in rows)
    for row in (row for row in rows if row.is_open):
        assert all(step.config.split == "validation" for step in row.trials)
        sums = [sum(r_m_of(Path(step.config.output).name) for step in point.trials) for point in row.points]
        record = next(one for one in records(name) if one["task"] == row.task and row.labels.items() <= one.items())
        assert record["step"] == Path(row.points[sums.index(max(sums))].measured.config.output).name
        assert record["tried"]


def test_delta_is_the_relative_change_of_r_m(there: Path) -> None:
    made = records("ablation")
    baseline = made[0]["r_m"]
    assert made[0]["row"] == "fine-tuned"
    for record in made[1:]:
        assert record["delta"] == pytest.approx(100 * (record["r_m"] / baseline - 1))
        assert record["delta_low"] <= record["delta"] <= record["delta_high"]


def test_over_all_tasks_r_m_is_the_mean(there: Path) -> None:
    made = {(record["task"], record["model"]): record for record in records("final")}
    assert {task for task, _ in made} == {"plain", "other", "all tasks"}
    means = [sum(made[task, model]["r_m"] for task in ("plain", "other")) / 2 for model in ("fine-tuned", "calibrated")]
    assert [made["all tasks", model]["r_m"] for model in ("fine-tuned", "calibrated")] == pytest.approx(means)
    assert made["all tasks", "calibrated"]["delta"] == pytest.approx(100 * (means[1] / means[0] - 1))
    assert {made[task, "calibrated"]["split"] for task in ("plain", "other")} == {"test"}


def test_alpha_and_candidates_reach_the_search(there: Path) -> None:
    for record in records("decoding"):
        assert record["setting"].startswith(f"{record['decoder']} {record['candidates']}")
        assert record["model"] == "fine-tuned, alpha" or "alpha" not in record["setting"]


def test_a_rate_that_the_calibration_itself_chose_is_told(there: Path) -> None:
    """Of two, in rows that hold the recipe's."""
    for record in records("ablation"):
        if record["group"] in ("similarity", "checkpoint") and record["row"]:
            assert record["tried"] in ("learning_rate=0.01", "learning_rate=0.001")


def test_a_wider_model_costs_more(there: Path) -> None:
    made = {(record["model"], record["slic"]): record for record in records("scaling")}
    assert made["wide", "fine-tuned"]["parameters"] - made["tiny", "fine-tuned"]["parameters"] == 2 * (2 * 16 * 32 + 32)
    assert made["wide", "fine-tuned"]["gflops"] != made["tiny", "fine-tuned"]["gflops"]


def test_tokens_are_those_of_the_sources_that_were_decoded(tmp_path: Path, tokenizer: Any) -> None:
    """Of 40, those chosen by a hash of their ids, which are not the first ones."""
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "t5"}))
    rows = [{"id": f"{number}", "source": " ".join(["a"] * (1 + number)), "target": "a"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare.run(
        prepare.Config(
            output=str(tmp_path / "data"), **dict.fromkeys(("train", "validation", "test"), str(tmp_path / "rows.jsonl"))
        )
    )
    chosen = store.read(data, "prepare").stream_examples("test", 10)
    lengths = [len(tokenizer(example.source)["input_ids"]) for example in chosen]
    found = results._mean_source_tokens(str(tmp_path / "model"), str(data), "test", 512, 10)
    assert found == sum(lengths) / 10 > sum(len(tokenizer(row["source"])["input_ids"]) for row in rows[:10]) / 10


def test_a_second_run_makes_nothing_again_but_a_lost_table(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    before = manifests(tmp_path)
    (Path("out/length/table.md")).unlink()
    for name in ("ablation", "length"):
        studies.run(name, tables(name))
    after = manifests(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"copy/out/length/manifest.json"}
    assert before.keys() == after.keys()
    assert Path("out/length/table.md").read_text() == (place / "out/length/table.md").read_text()


def test_a_changed_setting_makes_only_what_depends_on_it(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    before = steps()
    studies.run("scaling", tables("scaling", "study.num_candidates=[1]", "study.models={tiny={}}"))
    assert steps() == before, "greedy search of both models was measured by other studies"
    studies.run("scaling", tables("scaling", "study.models={tiny={}}", "calibrate.max_grad_norm=0.5"))
    assert steps() - before == Counter({"calibrate": 1, "evaluate": 1})


def dry_run(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["study", *arguments, "--dry-run"], env={"COLUMNS": "250"})
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    printed = dry_run("ablation", "recipe.toml")
    assert "ablation: 6 rows" in printed
    assert "similarity, token emb" in printed
    assert "0 of 20 steps are done. To do: 20; FLOPs: 0, unknown of 18" in printed
    assert [file.name for file in tmp_path.rglob("*")] == ["recipe.toml"]


def test_a_dry_run_says_what_is_there_and_what_the_rest_costs(there: Path) -> None:
    before = sorted(there.rglob("*"))
    assert dry_run("ablation", "recipe.toml", *SETTINGS["ablation"]).endswith("20 of 20 steps are done.")
    printed = dry_run("ablation", "recipe.toml", 'study.factors=["regularizer"]')
    assert re.search(r"\d of 13 steps are done\. To do: 6; FLOPs: \d\.\de\+\d+; time, [a-z ]+: \d+\.\d s$", printed), printed
    assert "unknown" not in printed
    assert sorted(there.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["ablate", "recipe.toml"], "unknown study ablate; did you mean ablation"),
        (["final", "recipe.toml", "study.alpha=[1]"], "unknown key study.alpha; did you mean alphas"),
        (["final", "recipe.toml", "study.alphas=[]"], "study.alphas must not be empty"),
        (["final", "recipe.toml", "study.tasks.mine=3"], "study.tasks.mine must be a table"),
        (["final", "recipe.toml", 'study.factors=["size"]'], "study.factors must be one of similarity"),
        (["scaling", "recipe.toml", "study.models.small=3"], "study.models.small must be a table"),
    ],
)
def test_mistakes_are_named_before_any_work(
    arguments: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    found = CliRunner().invoke(app, ["study", *arguments])
    assert isinstance(found.exception, CalibeamError)
    assert wanted in str(found.exception)
    assert not Path("out").exists()
