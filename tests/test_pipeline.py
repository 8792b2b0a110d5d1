"""Whole runs, from files to a checkpoint, as a user starts them."""

from __future__ import annotations

import csv
import glob
import html
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import calibeam
import forked
from calibeam import compare, pipeline, recipe, seq2seq, store
from calibeam.cli import app
from calibeam.records import CalibeamError
from calibeam.stages import evaluate, report
from conftest import TINY_RECIPE, Disk, sentence, tiny_model

Make = Callable[..., Path]
RECIPE = f"""max_source_length = 24
max_target_length = 8
{TINY_RECIPE}[finetune]
learning_rate = 1e-2
batch_size = 8
max_steps = 3
[decode]
num_candidates = 3
[calibrate]
batch_size = 8
max_steps = 2
[evaluate]
num_candidates = [1, 3]
"""
FOLDERS = ["prepare", "create", "finetune", "decode", "score", "calibrate", "evaluate/finetuned", "evaluate/calibrated",
           "report", "model"]  # fmt: skip
SMALL = ["calibrate.batch_size=8", "calibrate.max_steps=2", "calibrate.select=perplexity", "evaluate.num_candidates=[1,5]"]
SECRET = "hf_thisIsNobodysBusiness"


def command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_TOKEN": SECRET, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return forked.run([str(argument) for argument in arguments], environment, cwd, 120)


# calibeam run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its data, where the recipe ran once, as a command."""
    folder = tmp_path_factory.mktemp("run")
    for name, first, count in (("train", 0, 16), ("validation", 100, 8)):
        sources = [sentence(i, 8) for i in range(first, first + count)]
        rows = [{"source": source, "target": " ".join(source.split()[:3])} for source in sources]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE)
    done = command("run", "recipe.toml", cwd=folder)
    (folder / "printed").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a folder to spoil, which is the current one."""
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def tables(*settings: str) -> dict[str, Any]:
    return recipe.override(tomllib.loads(RECIPE), settings)


def manifests(place: Path) -> dict[str, bytes]:
    return {name: (place / "out" / name / store.MANIFEST).read_bytes() for name in FOLDERS}


def test_a_run_writes_every_folder_a_report_and_a_model(place: Path) -> None:
    found = {file.parent.relative_to(place / "out").as_posix() for file in (place / "out").rglob(store.MANIFEST)}
    assert found == set(FOLDERS)
    assert "<table>" in (place / "out" / "report.html").read_text()
    model = AutoModelForSeq2SeqLM.from_pretrained(place / "out" / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "out" / "model")
    assert model.generation_config.length_penalty == 0.0
    assert model.generation_config.num_beams > 1
    assert model.generate(**tokenizer("the red fox", return_tensors="pt"), max_new_tokens=4).shape[1] <= 5
    card = (place / "out/model/README.md").read_text()
    assert "# out-calibrated\n\nThis is `out` " in card  # after the run, as neither `finetune` nor `model` says anything
    printed = (place / "printed").read_text()
    assert "Traceback" not in printed
    for number, stage in enumerate(FOLDERS, start=1):
        assert f"[{number}/{len(FOLDERS)}] " in printed
        assert f"-> out/{stage}" in printed


def test_fault_56_no_secret_and_no_place_on_the_disk_is_told(place: Path) -> None:
    """In no file at all, and in what people pass on not even the folder that the run was started in."""
    for file in (place / "out").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    shared = [place / "printed", place / "out/report.html", place / "out/report/report.html", place / "out/model/README.md",
              place / "out/report/figures.json", *(place / "out").rglob("log.jsonl")]  # fmt: skip
    for file in shared:
        text = file.read_text()
        assert SECRET not in text, file
        assert str(place) not in text, file
        assert str(Path.home()) + "/" not in text, file
    exported = json.loads((place / "out/model" / store.MANIFEST).read_text())
    assert not exported["input_places"]
    assert not {"output", "calibrated"} & set(exported["settings"])


def test_a_second_run_makes_nothing_again(place: Path) -> None:
    """A manifest holds the time at which its folder was made."""
    before = manifests(place)
    done = command("run", "recipe.toml", cwd=place)
    assert done.returncode == 0, done.stderr
    assert manifests(place) == before
    for stage in ("prepare", "create", "finetune", "decode", "score", "calibrate", "evaluate", "report", "export"):
        assert f"\n{stage}: done already, verified\n" in done.stdout
        assert "done already" not in (place / "printed").read_text()
    for work in ("step 0: validation", "decode beam", "score decoder"):
        assert work in (place / "printed").read_text()
        assert work not in done.stdout


def test_fault_15_a_changed_setting_is_refused_by_name_and_made_again_when_forced(copy: Path) -> None:
    before = manifests(copy)
    with pytest.raises(
        CalibeamError,
        match=r"^out/calibrate was made with other settings or inputs:\n  settings\.beta: 10\.0 before, 5\.0 now\n"
        r"--force makes this stage again, and in a run those that follow; what it reads is kept\.",
    ):
        pipeline.run(tables("calibrate.beta=5.0"))
    assert manifests(copy) == before
    pipeline.run(tables("calibrate.beta=5.0"), force=True)
    assert json.loads((copy / "out/calibrate" / store.MANIFEST).read_text())["settings"]["beta"] == 5.0
    pipeline.run(tables("calibrate.beta=5.0"))  # all of it fits together again


def test_force_makes_again_only_what_has_changed(copy: Path) -> None:
    """As its help says: where the settings or inputs have changed."""
    before = manifests(copy)
    pipeline.run(tables("evaluate.num_candidates=[1, 2]"), force=True)
    after = manifests(copy)
    assert {name for name in FOLDERS if after[name] != before[name]} >= {"evaluate/finetuned", "evaluate/calibrated", "report"}
    assert {name: after[name] for name in FOLDERS[:6]} == {name: before[name] for name in FOLDERS[:6]}


@pytest.mark.parametrize("stage", ["create", "decode", "score", "evaluate", "report", "export"])
def test_fault_05_on_a_full_disk_a_stage_says_so_and_goes_on_when_there_is_room(
    stage: str, place: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second half of what it writes."""
    monkeypatch.chdir(place)
    step = next(step for step in pipeline.plan(tables()) if step.stage == stage)
    made = contents(Path(step.config.output))
    size = sum(map(len, made.values()))
    output = disk(f"size={max(size // 2, 4096)}") / "out" / Path(step.config.output).name
    again = replace(step, config=replace(step.config, output=str(output)))
    with pytest.raises(CalibeamError, match=r" cannot be written: No space left on device \([\d,]+ bytes are free there\)"):
        again.run()
    assert not output.exists()
    disk(f"size={4 * size + (1 << 20)}")
    assert contents(again.run()).keys() == made.keys()
    assert stage == "report" or contents(output) == made  # a report tells how long things took


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != store.MANIFEST)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_fault_15_a_changed_row_is_refused_by_name(copy: Path) -> None:
    rows = copy / "train.jsonl"
    rows.write_text(rows.read_text().replace("the", "teh", 1))
    with pytest.raises(CalibeamError, match=r"out/prepare was made .*:\n  train\.jsonl: other contents\n--force"):
        pipeline.run(tables())


@pytest.mark.parametrize("name", ["prepare/train.parquet", "decode/candidates-00000.parquet", "model/README.md",
                                  "calibrate/model/model.safetensors", "evaluate/finetuned/results.json"])  # fmt: skip
def test_fault_17_a_flipped_byte_is_refused_with_the_name_of_the_file(name: str, copy: Path) -> None:
    file = copy / "out" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CalibeamError, match=rf"out/{name} is damaged: .*\. --force makes its stage again$"):
        pipeline.run(tables())


# calibeam calibrate-model


@pytest.fixture
def files(tmp_path: Path, rows_file: Make) -> list[str]:
    """The options for 8 training rows and 6 for validation."""
    train, validation = rows_file("train.jsonl", 8), rows_file("validation.jsonl", 6, first=50)
    return ["--train", str(train), "--validation", str(validation), "--max-source-length", "24", "--max-target-length", "8",
            "--num-candidates", "4", "--learning-rate", "1e-3", "--learning-rate", "1e-4"]  # fmt: skip


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["calibrate-model", *map(str, arguments)])


def check_checkpoint(output: Path, work: Path, secret: Path) -> None:
    """An ordinary checkpoint, with a card that has the figures and no place on this disk."""
    names = {file.name for file in output.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    card = (output / "README.md").read_text()
    assert str(secret) not in card
    assert not re.search(r"(^|[\s`'\"(])/\w+/", card)
    before, after = (json.loads((work / "evaluate" / name / "results.json").read_text()) for name in ("finetuned", "calibrated"))
    for left, right in zip(before["settings"], after["settings"], strict=True):
        assert f"| {left['setting']} | {100 * left['r_m']:.2f} | {100 * right['r_m']:.2f} |" in card
        assert right["signature"] in card
    assert f"{before['perplexity']:.3f} before, {after['perplexity']:.3f} after" in card
    for file in (work / "report.html", work / "report/figures.json", *work.rglob("log.jsonl")):  # fault 56
        assert str(secret) not in file.read_text(), file


def check_generates_what_was_evaluated(output: Path, work: Path) -> None:
    """transformers alone, by the checkpoint's own generation config, writes the outputs that were measured."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    own = model.generation_config
    assert (own.length_penalty, own.num_beams, own.max_new_tokens, own.max_length) == (0.0, 5, 8, None)
    rows = store.read(work / "evaluate/calibrated", "evaluate").rows("outputs", evaluate.OUTPUTS)
    measured = {row["id"]: row["output"] for row in rows if row["setting"] == "beam 5"}
    examples = store.read(work / "prepare", "prepare").examples("test")
    assert len(measured) == len(examples) > 1
    for example in examples:
        source = tokenizer(example.source, truncation=True, max_length=24, return_tensors="pt")
        written = model.generate(**source)[0]
        assert tokenizer.decode(written, skip_special_tokens=True).strip() == measured[example.id]


@pytest.mark.parametrize("family", ["t5", "t5-untied", "bart", "pegasus"])
def test_a_model_of_ones_own_becomes_a_checkpoint(family: str, tmp_path: Path, files: list[str], model_folder: Make) -> None:
    settings = [*SMALL, "calibrate.regularizer=cross_entropy", "calibrate.reg_weight=1.0"]
    done = invoke("--model", model_folder(family, name="my-model"), *files, "--output", tmp_path / "new", *settings)
    assert done.exit_code == 0, done.output
    work = tmp_path / "new-work"
    check_checkpoint(tmp_path / "new", work, tmp_path)
    card = (tmp_path / "new/README.md").read_text()
    assert card.count("`my-model`") == 1
    assert "# new\n" in card
    assert 'place = "new"  # the folder of this checkpoint, or its name on the Hub' in card
    assert "Zhao et al., ICLR 2023" in card
    assert "Nothing changed" not in card + done.output
    check_generates_what_was_evaluated(tmp_path / "new", work)
    calibrated = json.loads((work / "calibrate" / store.MANIFEST).read_text())
    assert calibrated["counts"]["best_step"] > 0
    assert "| loss | rank, beta 10.0, all pairs |" in card
    rate = calibrated["counts"]["learning_rate"]
    assert rate in calibrated["settings"]["learning_rate"] == [1e-3, 1e-4]
    assert f"| cross_entropy, lambda 1 |\n| learning rate, batch | {rate} of 0.001, 0.0001; 8 |" in card
    before, after = (seq2seq.load(folder, device="cpu").model for folder in (tmp_path / "my-model", tmp_path / "new"))
    assert any((a != b).any() for a, b in zip(before.parameters(), after.parameters(), strict=True))
    answer = report.answer(json.loads((work / "report/figures.json").read_text())["rows"])
    assert f"\n**{answer}**\n" in card
    assert answer in " ".join(done.output.rpartition("report: ")[2].split())


def test_other_settings_are_tried_on_the_same_candidates_and_lengths_fit_the_model(
    tmp_path: Path, files: list[str], model_folder: Make
) -> None:
    """BART has 64 positions here, fewer than the 512 and 128 tokens that nobody asked for."""
    one, two = tmp_path / "one", tmp_path / "two"
    given = ("--model", model_folder("bart"), *files[:4], "--num-candidates", "4")
    assert invoke(*given, "--output", one, *SMALL).exit_code == 0
    rates = ("--learning-rate", "2e-3", "--learning-rate", "3e-3")
    done = invoke(*given, "--output", two, "--reuse", tmp_path / "one-work", *rates, *SMALL)
    assert done.exit_code == 0, done.output
    for stage in ("prepare", "decode", "score"):
        assert f"{stage}: done already, verified" in done.output
        assert not (tmp_path / "two-work" / stage).exists()
    decoded, calibrated = (
        store.read(place, stage).manifest["settings"]
        for place, stage in ((tmp_path / "one-work/decode", "decode"), (tmp_path / "two-work/calibrate", "calibrate"))
    )
    before = {file: file.read_bytes() for file in (tmp_path / "one-work").rglob("*") if file.is_file()}
    for forced in ((), ("--force",)):
        others = (*given[:-1], "5", "--output", tmp_path / "three", "--reuse", tmp_path / "one-work", *forced)
        refused = str(invoke(*others, *SMALL).exception)
        assert "num_candidates: 4 before, 5 now" in refused
        assert refused.endswith("\nGive the settings of that run, or leave --reuse out")
    assert before == {file: file.read_bytes() for file in (tmp_path / "one-work").rglob("*") if file.is_file()}
    assert (decoded["max_source_length"], calibrated["max_target_length"], calibrated["learning_rate"]) == (64, 64, [2e-3, 3e-3])
    with pytest.raises(CalibeamError, match=f"{two} is one stage of a run, `export`: give {tmp_path / 'two-work'}, the folder"):
        compare.run([one.with_name("one-work"), two], None)


def test_where_no_step_is_better_the_model_comes_back_as_it_was_and_everybody_is_told(
    tmp_path: Path, files: list[str], tokenizer: Any
) -> None:
    model = tiny_model("bart", vocabulary=len(tokenizer)).to(torch.bfloat16)
    model.generation_config.update(num_beams=4, length_penalty=2.0, no_repeat_ngram_size=3, max_length=20)
    model.save_pretrained(tmp_path / "mine/model")
    tokenizer.save_pretrained(tmp_path / "mine/model")
    own = {file.name: file.read_bytes() for file in (tmp_path / "mine/model").iterdir()}
    for name in ("trainer_state.json", "notes.txt"):
        (tmp_path / "mine/model" / name).write_text("{}")
    new, settings = tmp_path / "out/mine/model", [*SMALL, "calibrate.learning_rate=1e-30", "calibrate.reg_weight=1"]
    done = invoke("--model", tmp_path / "mine", *files, "--work", tmp_path / "work", "--output", new, *settings)
    assert done.exit_code == 0, done.output
    exported = {file.name: file.read_bytes() for file in new.iterdir()}
    card = exported.pop("README.md").decode()
    exported.pop(store.MANIFEST)
    assert exported == own
    assert "no learning rate was better" not in done.output
    said = " ".join(done.output.rpartition("report: ")[2].split())
    page = html.unescape((tmp_path / "work/report.html").read_text())
    remarks = [
        "Nothing changed: no step was better on validation, so the model is exported unchanged. "
        "Another learning_rate or a smaller beta may do better.",
        f"The fine-tuned model's generation config asks for length_penalty=2.0, no_repeat_ngram_size=3 and forced_eos_token_id="
        f"{model.generation_config.forced_eos_token_id}. Both models were "
        "decoded without: with its own settings the fine-tuned model may do better than it does here.",
    ]
    assert said.endswith(" ".join(remarks))
    for remark in remarks:
        assert f"\n**{remark}**\n" in card
        assert remark in page
    assert "Not measurably" not in page
    assert "# mine-calibrated\n\nThis is `mine` as it was." in card


def test_a_table_with_columns_of_other_names_and_several_references(tmp_path: Path, model_folder: Make) -> None:
    for name, first, count in (("train", 0, 8), ("validation", 50, 6)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["key", "long, text", "short", "shorter"])
            for i in range(first, first + count):
                words = sentence(i, 8).split()
                writer.writerow([f"k{i}", " ".join(words), " ".join(words[:3]), ", ".join(words[-2:])])
    model_folder("bart", name="my-model")
    columns = ["--source-column", "long, text", "--target-column", "short", "--target-column", "shorter", "--id-column", "key"]
    done = command(
        "calibrate-model", "--model", "my-model", "--train", "train.csv", "--validation", "validation.csv", *columns,
        "--source-prefix", "shorten: ",
        "--output", "new", "--max-source-length", "24", "--max-target-length", "8", "--num-candidates", "4", *SMALL, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_checkpoint(tmp_path / "new", tmp_path / "new-work", tmp_path)
    examples = store.read(tmp_path / "new-work/prepare", "prepare").examples("train")
    words = sentence(0, 8).split()
    assert examples[0] == calibeam.Example("k0", f"shorten: {' '.join(words)}", (" ".join(words[:3]), ", ".join(words[-2:])))


def test_a_model_that_will_not_do_is_refused_before_any_stage(
    tmp_path: Path, files: list[str], tokenizer: Any, model_folder: Make
) -> None:
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "gpt")
    for name, file in (("untokenized", "tokenizer.json"), ("weightless", "model.safetensors")):
        (model_folder("t5", name=name) / file).unlink()
    (tmp_path / "untokenized" / "tokenizer_config.json").unlink()
    small = [model_folder("bart"), "--max-source-length", "65"]
    for options, message in (
        (["some/where"], "no model at some/where: not a folder, and the Hugging Face Hub cannot be reached"),
        ([tmp_path / "gpt"], "gpt2 model, which is not an encoder-decoder"),
        ([tmp_path / "untokenized"], "untokenized has no tokenizer files: save the tokenizer beside the model"),
        ([tmp_path / "weightless"], "weightless has no .safetensors weights"),
        (small, "decode.max_source_length is 65, but the model has 64 positions"),
        ([*small, "decode.max_source_length=64"], "calibrate.max_source_length is 65, but the model has 64 positions"),
        ([model_folder("t5"), "--num-candidates", "1"], "decode.num_candidates is 1"),
        ([tmp_path / "t5-0", "score.similarity=bertscore", "score.bertscore_model=some/where"], "no model at some/where"),
    ):
        done = invoke(*files, "--output", tmp_path / "new", "--model", *options)
        assert isinstance(done.exception, CalibeamError), done.output
        assert message in str(done.exception)
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "new-work").exists()


def test_lengths_that_differ_are_mentioned_and_those_of_a_model_to_be_made_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data are nowhere, so a run ends with its first stage."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibeamError, match="no file at train"):
        pipeline.run(tables())
    assert "differ" not in capsys.readouterr().out
    with pytest.raises(CalibeamError, match="no file at train"):
        pipeline.run(tables("calibrate.max_target_length=9"))
    said = " ".join(capsys.readouterr().out.split())
    assert "lengths differ: finetune.max_target_length is 8, decode.max_new_tokens is 8, " in said
    assert "calibrate.max_target_length is 9" in said
    with pytest.raises(CalibeamError, match=r"^finetune\.max_target_length is 33, but the model has 32 positions: "):
        pipeline.run(tables("max_target_length=33"))


def test_an_output_folder_that_is_in_use_is_refused_before_any_work(tmp_path: Path, files: list[str], model_folder: Make) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.txt").write_text("mine")
    done = invoke("--model", model_folder("t5"), *files, "--output", tmp_path / "new", *SMALL)
    assert isinstance(done.exception, CalibeamError)
    assert f"{tmp_path / 'new'} is in use" in str(done.exception)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "new-work" / "calibrate").exists()


def test_every_template_is_part_of_the_package() -> None:
    """What pyproject.toml leaves out is missing from an installed calibeam, and only then."""
    package = Path(calibeam.__file__).parent
    patterns = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "calibeam"
    ]
    packed = {package / name for pattern in patterns for name in glob.glob(pattern, root_dir=package, recursive=True)}
    others = {file for file in package.rglob("*") if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts}
    assert others - packed == set()
