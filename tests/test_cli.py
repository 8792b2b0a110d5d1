"""The command line, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import calibeam
import forked
from calibeam import store
from calibeam.seq2seq import save
from calibeam.stages import STAGES, decode, evaluate, prepare
from conftest import model_of_words

VERBS = [
    *(name for name in STAGES if name not in ("report", "export")),
    "run", "plan", "calibrate-model", "compare", "tasks", "doctor",
]  # fmt: skip
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
ENVIRONMENT["PYTHONPATH"] = str(Path(calibeam.__file__).parents[1])  # the same calibeam, wherever it runs


def command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return forked.run([str(argument) for argument in arguments], ENVIRONMENT, cwd, 60)


def refused(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What is said on standard error about a mistake."""
    done = command(*arguments, cwd=cwd)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.fixture
def data(tmp_path: Path, rows_file: Callable[..., Path]) -> Path:
    """A prepared dataset."""
    train, validation = rows_file("train.jsonl", 4), rows_file("validation.jsonl", 4, first=10)
    return prepare.run(prepare.Config(output=str(tmp_path / "data"), train=str(train), validation=str(validation)))


# Help


def test_help_shows_where_to_start_and_every_verb() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "calibeam run recipe.toml" in done.stdout
    for verb in (*STAGES, "run", "calibrate-model", "tasks", "doctor"):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_reads_and_writes_and_gives_an_example(verb: str) -> None:
    done = command(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("Reads:", "Writes:", "Example:"):
        assert f"\n  {word} " in done.stdout  # on a line of its own
    assert f"calibeam {verb}" in done.stdout


def test_the_help_of_calibrate_model_names_what_it_takes_and_its_defaults() -> None:
    text = " ".join(command("calibrate-model", "--help").stdout.split())
    assert "training rows: a JSONL, JSON, CSV, TSV or Parquet file, or hub:NAME:SPLIT" in text
    assert "may be given several times [default: (target)]" in text


def test_the_help_of_a_stage_lists_every_setting_with_its_default_and_choices() -> None:
    text = " ".join(command("decode", "--help").stdout.split())
    assert "data the folder written by prepare; required" in text
    assert "method how to search (beam, diverse_beam, nucleus); default beam" in text
    assert "num_candidates candidates per source; default 15" in text
    assert "groups for diverse_beam: groups of beams; one beam each if not given; default none" in text


def test_help_and_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    lines = [[verb, "--help"] for verb in VERBS]
    lines += [
        ["tasks"],
        ["--version"],
        ["decode", "outptu=x"],
        ["run", str(tmp_path / "absent.toml")],
        ["prepare", f"output={tmp_path}"],
    ]
    code = f"""
import sys
from calibeam.cli import main
for line in {lines!r}:
    sys.argv = ["calibeam", *line]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code)
print("heavy:", sorted({{"torch", "transformers", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)  # noqa: S603
    assert done.stdout.count("ended with 0") == len(VERBS) + 2
    assert done.stdout.count("ended with 2") == 3
    assert done.stdout.endswith("heavy: []\n")


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"calibeam {calibeam.__version__}\n")


def test_of_several_processes_the_first_alone_does_what_is_not_for_several() -> None:
    """And none of them needs to find the others for that."""

    def of_two(rank: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.run(arguments, {**ENVIRONMENT, "WORLD_SIZE": "2", **rank})

    for arguments in (["--version"], ["tasks"], ["plan"], ["run", "--help"], ["prepare", "outptu=x"]):
        here, there = (of_two({"RANK": rank}, *arguments) for rank in "01")
        assert here.stdout or here.stderr
        assert (there.returncode, there.stdout, there.stderr) == (0, "", "")
    assert of_two({}, "tasks").stdout == command("tasks").stdout
    lost = of_two({}, "finetune", "output=x")
    assert lost.returncode == 2
    assert lost.stderr == (
        "error: the environment says that this is one of several processes, and not which: WORLD_SIZE=2, no RANK, "
        "no MASTER_ADDR, no MASTER_PORT. Start them by torchrun or accelerate launch, or unset WORLD_SIZE\n"
    )


def test_processes_that_cannot_meet_say_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        lost = forked.run(["finetune", "output=x"], {**ENVIRONMENT, **given})
    assert lost.returncode == 2
    assert f"\nerror: the processes cannot meet at 127.0.0.1:{given['MASTER_PORT']}: " in f"\n{lost.stderr}"
    assert "Traceback" not in lost.stderr


def test_the_tasks_are_listed_with_the_papers_figures() -> None:
    done = command("tasks")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("cnn_dailymail", "xsum", "reddit_tifu_long", "samsum", "squad_qg", "msmarco_nlg", "webnlg_en", "commongen"):
        assert f"\n{name}: " in done.stdout
    assert "fine-tuned 44.31/21.91/41.41, calibrated 47.97/24.18/44.88" in done.stdout


# Mistakes in settings


def test_an_output_without_a_name_is_refused(tmp_path: Path) -> None:
    given = ("--model", "m", "--train", "t.jsonl", "--validation", "v.jsonl", "--output")
    for place in (".", "/"):
        told = refused("calibrate-model", *given, place, cwd=tmp_path)
        assert told == f"error: --output must name a folder to make, got '{place}'\n"


def test_an_option_of_a_stage_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    told = refused("calibrate", "mine.toml", "--learning-rate", "1e-3", "--learning-rate", "1e-4", cwd=tmp_path)
    assert told == "error: --learning-rate is given twice: write several values as learning_rate=[...]\n"


def test_a_length_of_0_is_refused(tmp_path: Path) -> None:
    given = ("--model", "m", "--train", "t.jsonl", "--validation", "v.jsonl", "--output", "new", "--max-source-length", "8",
             "--max-target-length", "0")  # fmt: skip
    assert "must be at least 1, got 0" in refused("calibrate-model", *given, cwd=tmp_path)


def test_a_checkpoint_and_its_stages_in_one_folder_are_refused(tmp_path: Path) -> None:
    """The run's own model folder beside the stages is where it is without --output."""
    given = ("--model", "m", "--train", "t.jsonl", "--validation", "v.jsonl", "--max-source-length", "8",
             "--max-target-length", "8")  # fmt: skip
    for output, work in (("new", "new"), ("new", "new/work"), ("new/work/score", "new/work")):
        told = refused("calibrate-model", *given, "--output", output, "--work", work, cwd=tmp_path)
        assert re.search(rf"^error: \w+ writes .* export writes {output}: none can be inside the other|both write", told)
    told = refused("calibrate-model", *given, "--output", "new/model", "--work", "new", cwd=tmp_path)
    assert "inside" not in told
    assert not any(tmp_path.iterdir())


def test_a_run_to_reuse_must_be_there(tmp_path: Path) -> None:
    given = ("--model", "m", "--train", "t.jsonl", "--validation", "v.jsonl", "--output", "new", "--reuse", "odl-work")
    told = refused("calibrate-model", *given, cwd=tmp_path)
    assert told == "error: --reuse odl-work is not the -work folder of another run: it has no finished prepare\n"
    assert not any(tmp_path.iterdir())


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    assert refused("decode", "output=x", "num_candidate=3") == (
        "error: unknown key decode.num_candidate; did you mean num_candidates?\n"
    )


def test_a_setting_of_another_stage_is_not_silently_dropped(tmp_path: Path, data: Path) -> None:
    setting = f"train={tmp_path / 'train.jsonl'}", f"validation={tmp_path / 'validation.jsonl'}"
    assert "prepaer" in refused("prepare", f"output={tmp_path / 'out'}", *setting, "prepaer.max_train=1")
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_in_a_recipe_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'output = "{tmp_path / "run"}"\nmodel = "m"\n[calibrate]\nbetta = 3\n')
    assert refused("run", recipe) == "error: unknown key calibrate.betta; did you mean beta?\n"
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    assert refused("run", tmp_path / "absent.toml") == f"error: no recipe at {tmp_path / 'absent.toml'}\n"


# prepare


def test_prepare_with_a_recipe_and_with_settings_alone(tmp_path: Path, rows_file: Callable[..., Path]) -> None:
    rows_file("train.jsonl", 4)
    rows_file("validation.jsonl", 4, first=10)
    recipe = tmp_path / "recipe.toml"
    files = [f"{split}={tmp_path / split}.jsonl" for split in ("train", "validation")]
    recipe.write_text(f'output = "{tmp_path / "run"}"\nmodel = "m"\n[prepare]\nmax_train = 2\n')
    done = command("prepare", recipe, *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 train, 2 validation, 2 test rows" in done.stdout
    assert store.read(tmp_path / "run" / "prepare", "prepare").manifest["settings"]["max_train"] == 2
    alone = f"output={tmp_path / 'alone'}"
    assert command("prepare", alone, *files).returncode == 0
    assert len(store.read(tmp_path / "alone", "prepare").examples("train")) == 4
    assert "settings.max_train: 0 before, 1 now" in refused("prepare", alone, *files, "max_train=1")
    assert command("prepare", alone, *files, "max_train=1", "--force").returncode == 0
    assert len(store.read(tmp_path / "alone", "prepare").examples("train")) == 1


def test_a_task_is_prepared_from_a_folder_and_its_properties_are_printed(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        row = {"id": name, "dialogue": f"Ann: hello {name}", "summary": "Ann says hello."}
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    done = command("prepare", f"output={tmp_path / 'out'}", "task=samsum", f"path={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 / 1 / 1" in done.stdout
    assert "14,732 / 818 / 819" in done.stdout
    assert "1 train, 1 validation, 1 test rows" in done.stdout


def test_a_bad_row_is_an_error_with_file_and_row(tmp_path: Path, rows_file: Callable[..., Path]) -> None:
    train = rows_file("train.jsonl", 2)
    with train.open("a") as file:
        file.write('{"source": "no target"}\n')
    setting = f"output={tmp_path / 'out'}", f"train={train}", f"validation={train}"
    message = refused("prepare", *setting)
    assert message.endswith("leave them out with prepare.bad_rows=skip (calibrate-model: --bad-rows skip)\n")
    assert f"{train} has 1 row that cannot be used:\n  row 3: no field 'target'; it has 'source'\n" in message
    assert not (tmp_path / "out").exists()
    done = command("prepare", *setting, "prepare.bad_rows=skip")  # the advice can be followed as it stands
    assert done.returncode == 0, done.stderr


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, rows_file: Callable[..., Path]) -> None:
    train = rows_file("train.jsonl", 4)
    assert str(train) in refused("prepare", f"output={train}/out", f"train={train}", f"validation={train}")


def test_fault_45_escapes_in_data_and_file_names_never_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31m\x1b]0;title\x07\x9b2J\u202e"
    file = tmp_path / f"{evil}.jsonl"
    good, odd = {"id": f"x{evil}", "source": "s", "target": "t"}, {evil: "s"}
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (good, good, odd, odd | {"source": 1})))
    places = f"train={file}", f"validation={file}", f"test={file}"
    skipped = command("prepare", f"output={tmp_path / 'out'}", *places, "bad_rows=skip")
    assert skipped.returncode == 0
    assert "row 2: field 'id' repeats the id" in skipped.stdout
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(r'"\u001b[31m" = 3')
    said = [
        skipped.stdout,
        skipped.stderr,
        refused("prepare", f"output={tmp_path / 'other'}", *places),
        refused("run", recipe),
        refused("run", tmp_path / evil),
    ]
    for text in said:
        assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_a_file_name_that_is_not_unicode_is_no_reason_to_break_down(tmp_path: Path, rows_file: Callable[..., Path]) -> None:
    odd = rows_file("train.jsonl", 4).rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    done = command("prepare", f"output={tmp_path / 'out'}", f"train={odd}", f"validation={odd}")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert (tmp_path / "out").exists() == (done.returncode == 0)


def test_fault_04_an_interrupted_stage_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """As Ctrl-C does it: to the processes that work for it too."""
    line = [sys.executable, "-m", "calibeam", "prepare", f"output={tmp_path / 'out'}", "task=docstrings"]
    with subprocess.Popen(  # noqa: S603
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        children, deadline = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 30
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "error: stopped by SIGINT. Nothing half-written is left behind; run the same command again to resume\n"
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_fault_04_an_interruption_while_it_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "calibeam", "tasks"], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


# decode


def test_decode_refuses_a_folder_that_is_not_a_model(tmp_path: Path, data: Path) -> None:
    assert refused("decode", f"output={tmp_path / 'out'}", f"data={data}", f"model={data}") == (
        f"error: {data} is not a model: it has no config.json\n"
    )


def test_decode_refuses_more_source_tokens_than_the_model_has_positions(tmp_path: Path, data: Path, model_folder: Any) -> None:
    places = f"output={tmp_path / 'out'}", f"data={data}", f"model={model_folder('bart')}"
    assert refused("decode", *places, "max_source_length=100", "max_new_tokens=10") == (
        "error: decode.max_source_length is 100, but the model has 64 positions: lower it there, or max_source_length at the top "
        "of the recipe (calibrate-model: --max-source-length)\n"
    )
    assert not (tmp_path / "out").exists()


def test_decode_refuses_a_tokenizer_that_knows_nothing_of_the_text(tmp_path: Path, data: Path) -> None:
    save(model_of_words(), tmp_path / "words")
    rows = "".join(json.dumps({"source": f"Zażółć gęślą jaźń {i}", "target": "t"}) + "\n" for i in range(4))
    (tmp_path / "polish.jsonl").write_text(rows)
    files = f"train={tmp_path / 'polish.jsonl'}", f"validation={tmp_path / 'polish.jsonl'}"
    assert command("prepare", f"output={tmp_path / 'polish'}", *files).returncode == 0
    places = f"output={tmp_path / 'out'}", f"model={tmp_path / 'words'}", "max_source_length=24", "max_new_tokens=4"
    message = refused("decode", *places, f"data={tmp_path / 'polish'}")
    assert "does not know 100% of the tokens of the sources, such as 'Zażółć gęślą jaźń 0'" in message
    assert "does not know" not in command("decode", *places, f"data={data}").stdout


def test_a_task_prefix_that_is_missing_is_mentioned(tmp_path: Path, data: Path, model_folder: Any) -> None:
    folder = model_folder("t5")
    config = json.loads((folder / "config.json").read_text())
    tasks = {"summarization": {"prefix": "summarize: ", "num_beams": 4}, "other": {}, "odd": "text"}
    (folder / "config.json").write_text(json.dumps({**config, "task_specific_params": tasks}))
    places = f"model={folder}", "max_source_length=24", "max_new_tokens=4", "num_candidates=2"
    said = " ".join(command("decode", f"output={tmp_path / 'out'}", f"data={data}", *places).stdout.split())
    assert "the model's config names task prefixes ('summarize: '), and no source begins with one" in said
    assert "prepare.source_prefix (calibrate-model: --source-prefix)" in said
    assert any("task prefixes" in note for note in store.read(tmp_path / "out", "decode").manifest["notes"])
    files = [f"{split}={tmp_path / split}.jsonl" for split in ("train", "validation")]
    assert command("prepare", f"output={tmp_path / 'prefixed'}", *files, "source_prefix=summarize: ").returncode == 0
    done = command("decode", f"output={tmp_path / 'other'}", f"data={tmp_path / 'prefixed'}", *places)
    assert done.returncode == 0, done.stderr
    assert "prefix" not in done.stdout


def test_decode_refuses_a_decoder_only_model(tmp_path: Path, data: Path, tokenizer: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    message = refused("decode", f"output={tmp_path / 'out'}", f"data={data}", f"model={folder}")
    assert message.startswith(f"error: {folder} holds a gpt2 model, which is not an encoder-decoder")


# Functions of one's own

MINE = """
from pathlib import Path
Path("it-ran").touch()

def longer(candidates, target):
    import torch
    return torch.tensor([[float(len(text)) for text in texts] for texts in candidates.texts])

def letters(predictions, references):
    return [len(text) for text in predictions]
"""


@pytest.fixture
def place(tmp_path: Path, data: Path, model_folder: Any) -> Path:
    """A folder with a module, in which candidates were decoded; the other arguments of score are in a recipe."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    model = model_folder("t5")
    config = decode.Config(
        data=str(data), model=str(model), output=str(folder / "run/decode"), num_candidates=3, max_new_tokens=5
    )
    decode.run(config)
    recipe = f'output = "run"\nmodel = "{model}"\n[prepare]\noutput = "{data}"\ntrain = "t"\nvalidation = "v"\n'
    (folder / "recipe.toml").write_text(recipe)
    (folder / "evil.toml").write_text(recipe + '[score]\nsimilarity = "mine:longer"\n[evaluate]\nmetrics = ["mine:letters"]')
    return folder


@pytest.mark.parametrize("line", [["score"], ["evaluate", "--allow-code"], ["run", "--allow-code"]], ids=" ".join)
def test_fault_52_a_recipe_can_run_no_code_even_beside_the_flag(line: list[str], place: Path) -> None:
    said = refused(line[0], "evil.toml", *line[1:], cwd=place)
    assert "module:function works only on the command line, with --allow-code" in said
    assert not (place / "it-ran").exists()


def test_a_function_named_on_the_command_line_needs_the_flag(place: Path) -> None:
    assert refused("score", "recipe.toml", "similarity=mine:longer", cwd=place) == (
        "error: score.similarity must be one of decoder, tokens, rouge, bertscore, got 'mine:longer'; "
        "module:function works only on the command line, with --allow-code\n"
    )
    assert not (place / "it-ran").exists()
    done = command("score", "recipe.toml", "similarity=mine:longer", "--allow-code", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "it-ran").exists()
    for row in store.read(place / "run/score", "score").rows("scored", store.SCORED):
        assert row["similarity"] == [len(text) for text in row["texts"]]


def test_fault_15_a_changed_function_is_another_making(place: Path) -> None:
    line = "score", "recipe.toml", "similarity=mine:longer", "--allow-code"
    assert command(*line, cwd=place).returncode == 0
    (place / "mine.py").write_text(MINE.replace("float(", "-1 - float("))
    said = refused(*line, cwd=place)
    assert "settings.similarity: 'mine:longer sha256:" in said
    assert "--force makes this stage again" in said
    assert command(*line, "--force", cwd=place).returncode == 0
    assert all(max(row["similarity"]) < 0 for row in store.read(place / "run/score", "score").rows("scored", store.SCORED))


def test_a_metric_named_on_the_command_line(place: Path, data: Path) -> None:
    settings = "output=e", f"data={data}", f"model={place.parent / 't5-0'}", "num_candidates=[2]", "max_new_tokens=5"
    done = command("evaluate", *settings, 'metrics=["gem", "mine:letters"]', "--allow-code", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "mine:letters mean" in done.stdout
    (result,) = json.loads((place / "e/results.json").read_text())["settings"]
    assert list(result["metrics"]) == ["rouge", "repetition", "gem", "mine:letters"]
    outputs = store.read(place / "e", "evaluate").rows("outputs", evaluate.OUTPUTS)
    mean = sum(len(row["output"]) for row in outputs) / len(outputs)
    assert result["metrics"]["mine:letters"]["figures"]["mean"]["value"] == pytest.approx(mean)


def test_settings_of_a_stage_may_be_written_as_options() -> None:
    """--key value, --key=value and key=value are one, wherever the recipe stands."""
    from calibeam.cli import _assignments

    wanted = ["r.toml", "engine=ray", "max_new_tokens=7", "seed=1"]
    assert _assignments(["--engine", "ray", "r.toml", "--max-new-tokens=7", "seed=1"]) == wanted
    needed = ("decode", "output=x", "data=x", "model=x")
    assert "unknown key decode.engin; did you mean engine?" in refused(*needed, "--engin", "ray")
    assert "--engine needs a value" in refused(*needed, "--engine")
