"""Training on several processes beside training on one: two that torchrun or `accelerate launch` starts, and two or four that are
forked with the environment that these would give them, which takes less time."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import calibeam
import forked
from calibeam import checkpoint, distributed, recipe, seq2seq, signals, stages, store
from calibeam.stages import create, decode, prepare, score
from calibeam.stages import tokenizer as tokenizer_stage
from conftest import model_of_words, once, sentence
from test_signals import signalled
from test_training import with_dropout

TRAINING: dict[str, Any] = {
    "batch_size": 7, "micro_batch_size": 2, "max_steps": 6, "eval_steps": 3, "learning_rate": 1e-3, "max_source_length": 20,
    "max_target_length": 6, "device": "cpu",
}  # fmt: skip
"""Seven examples of 16 in parts of two, so that no number of processes divides them, and a last batch of two."""

STAGES = """
import json, os, sys, time, torch
from calibeam import cli, distributed, families, recipe, stages, training
from calibeam.engine import packing, sharding
from calibeam.pipeline import Step
from calibeam.records import CalibeamError
from conftest import FAMILIES, tiny_model

step = training.TrainingStep.__call__
given, also = sys.argv[1:]
sys.argv = ["calibeam", "run"]

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once, or processes mix their lines

def slowly(self, batch, number):
    if "signalled" in self._config.output and number == 2:
        own = sum(parameter.to_local().numel() for parameter in self._parameters)
        say(f"holds {own} of {sum(parameter.numel() for parameter in self._parameters)}")
        if distributed.rank() == 1:
            say(f"at 2 is {os.getpid()}")
            time.sleep(1.5)
    return step(self, batch, number)

class Counted(sharding._Unit):
    most = 0

    def forward(self, function, *inputs):
        if sharding.is_share(next(self.parameters())):
            raise AssertionError("its weights were not gathered")
        units = [each for each in sharding._units.values() if not sharding.is_share(next(each.parameters()))]
        Counted.most = max(Counted.most, len(units))
        return function(*inputs)

def loss_of(model, reference, rank):
    generator = torch.Generator().manual_seed(rank)
    ids, tokens = (torch.randint(2, 23, shape, generator=generator) for shape in ((2, 7), (2, 3, 5)))
    every = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(tokens, dtype=torch.bool)
    tree = packing.plant(model, tokens, every[1])
    with torch.no_grad():
        theirs = packing.Forced(packing.Source(reference, ids, every[0]), tree).at_target()
    ours = packing.Forced(packing.Source(model, ids, every[0]), tree)
    return ours.log_p().square().sum() + ours.regularization(packing.regularization.kl, theirs).sum()

def apart(family):
    # Of all gradients together, those of shares beside those of whole models.
    model, reference, whole, whole_reference = (tiny_model(family, seed, 23) for seed in (0, 5, 0, 5))
    sum(loss_of(whole, whole_reference, rank) for rank in range(distributed.size())).backward()
    model.gradient_checkpointing_enable()
    sharded = sharding.Sharded(model, torch.float32, reference.requires_grad_(False))
    sharded(lambda: loss_of(model, reference, distributed.rank())).backward()
    pairs = [(a.grad.full_tensor(), b.grad) for a, b in zip(model.parameters(), whole.parameters()) if b.grad is not None]
    found, wanted = (torch.cat([gradient.flatten() for gradient in each]) for each in zip(*pairs))
    return float((found - wanted).norm() / wanted.norm())

def work(**_):
    distributed.BUCKET = 3  # so that there are three: of several tensors, of a larger one, and what is left
    ours = [torch.full((size,), 10.0 ** distributed.rank()) for size in (1, 2, 5, 1)]
    distributed.add_up(ours)
    say(f"sums {[tensor.tolist() for tensor in ours]}")
    distributed.BUCKET = 1000
    if also == "families":
        say(f"apart {max(map(apart, FAMILIES)):.0e}")
        try:
            sharding.Sharded(tiny_model("umt5"), torch.float32)
        except CalibeamError as error:
            say(error)
    for name, settings in json.loads(given):
        Step(name, recipe.build(stages.load(name).Config, name, settings)).run()
        say(f"gathered {Counted.most}")

training.TrainingStep.__call__, sharding._Unit, cli.app = slowly, Counted, work
with distributed.joined():
    say(f"met {distributed.by_first(lambda: 'before')}")
try:
    cli.main()
except SystemExit as end:
    say(f"ends with {end.code}")
    raise
"""

TROUBLE = """
import json, os, signal, sys, torch
import pytest
from calibeam import display, distributed, pipeline, recipe, seq2seq, signals, stages, store
from calibeam.pipeline import Step
from calibeam.records import CalibeamError
from calibeam.stages import evaluate
from test_signals import signalled

settings, tables = json.loads(sys.argv[1])
second, versions = os.environ["RANK"] == "1", store.versions()
store.SEEN_WITHIN = 0.3

def attempt(name, stage=None, patch=lambda patched: None, **others):
    # A training that meets with some trouble; the others are settings of the second process alone.
    own = {**settings, "output": f"{settings['output']}-{name}", **(others if second else {})}
    try:
        with pytest.MonkeyPatch.context() as patched, signals.listening(), distributed.joined():
            patch(patched)
            stage() if stage else Step("finetune", recipe.build(stages.load("finetune").Config, "finetune", own)).run()
        end = "done"
    except (CalibeamError, signals.Stopped) as error:
        end = f"{type(error).__name__}{'' if display.errors.quiet else ', ' + str(error)}"
        torch.distributed.destroy_process_group()
    os.write(1, f"{name} in {os.environ['RANK']}: {end}\\n".encode())

def no_room(model, folder):
    raise CalibeamError("there is no room")

def sampled(patched):
    patched.setattr(store, "versions", lambda: versions | ({"torch": "1.13"} if second else {}))

attempt("settings", save_steps=3, gradient_checkpointing=True)
attempt("versions", patch=sampled)
tables["finetune"]["micro_batch_size"] = 3 if second else 4
attempt("recipe", lambda: pipeline.run(tables))
attempt("device", patch=lambda patched: second and patched.setattr(seq2seq, "best_device", lambda *_: torch.device("meta")))
attempt("disk", output=settings["output"] + "-elsewhere")
attempt("validation", patch=lambda patched: second and signalled(patched, evaluate.Validation, "measure", signal.SIGTERM, 3))
attempt("save", patch=lambda patched: patched.setattr(seq2seq, "save", no_room))
"""


def work_of(name: str, work: Path, output: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A stage and its settings."""
    places = {"data": str(work / "data"), "model": str(work / "model"), "output": str(output)}
    of_t5 = {"model": str(work / "t5"), "scored": str(work / "t5-score"), "select": "perplexity", "learning_rate": 1e-4}
    own: dict[str, Any] = {
        "t5": {**places, **of_t5},
        "finetune": {**places, "select": "perplexity"},
        "calibrate": {**places, "scored": str(work / "score"), "select": "perplexity", "learning_rate": 1e-4},
        "pretrain": {
            "model": str(work / "pieces-model"), "output": str(output), "files": [str(work / "documents.txt")], "workers": 0,
            "buffer_size": 20, "warmup_steps": 2, "mlm_ratio": 0.1, "validation_files": [str(work / "documents.txt")],
        },
    }  # fmt: skip
    return "calibrate" if name == "t5" else name, {**TRAINING, **own[name], **changes}


def alone(stage: tuple[str, dict[str, Any]]) -> Path:
    module = stages.load(stage[0])
    return module.run(recipe.build(module.Config, *stage))


def start(folder: Path, *some: Any, also: str = "", code: str = STAGES) -> tuple[Path, list[str], dict[str, str]]:
    """A script, its arguments and its environment."""
    script = folder / "script.py"
    script.write_text(code)
    places = os.pathsep.join(map(str, (Path(calibeam.__file__).parents[1], Path(__file__).parent)))
    return script, [json.dumps(some), also], {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, script: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)]
    return subprocess.Popen(  # noqa: S603
        [*line, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "distributed", prepared)


def prepared(folder: Path) -> None:
    """What the stages read; `whole` has what each makes on one process. Half of the targets are what the model writes itself,
    so that ROUGE is not 0."""
    folder.mkdir()
    model = model_of_words()
    seq2seq.save(model, folder / "model")
    with_dropout(0.2, folder / "model")
    generation = folder / "model/generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"no_repeat_ngram_size": 3}))
    texts = [sentence(i, 4 + i % 7) for i in range(16)]
    sources, _ = model.encode_sources(texts, 20)
    search = {"num_candidates": 2, "max_new_tokens": 6}
    outputs = [row["texts"][0] for row in decode.decode_all(model, texts, sources, search, seed=0, description="")]
    targets = [output if i % 2 and output else sentence(i, 1 + i % 4) for i, output in enumerate(outputs)]
    rows = [{"source": source, "target": target} for source, target in zip(texts, targets, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = [". ".join(sentence(10 * i + j, 3 + j).capitalize() for j in range(4)) + "." for i in range(30)]
    (folder / "documents.txt").write_text("\n\n".join(documents))
    file = str(folder / "rows.jsonl")
    prepare.run(prepare.Config(output=str(folder / "data"), train=file, validation=file, test=file))
    seq2seq.save(t5_of_words(model), folder / "t5")
    for name, prefix in (("model", ""), ("t5", "t5-")):
        places = {"data": str(folder / "data"), "model": str(folder / name), "device": "cpu"}
        found = str(folder / f"{prefix}decode")
        decode.run(decode.Config(**places, output=found, num_candidates=4, max_new_tokens=6, max_source_length=20))
        score.run(score.Config(**places, candidates=found, output=str(folder / f"{prefix}score")))
    make_pieces(folder)
    for name in ("finetune", "calibrate", "pretrain", "t5"):
        alone(work_of(name, folder, folder / "whole" / name))


def t5_of_words(model: seq2seq.Seq2Seq) -> seq2seq.Seq2Seq:
    """One that reads and writes with the same tokenizer."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return seq2seq.Seq2Seq(T5ForConditionalGeneration(T5Config(vocab_size=len(model.tokenizer), **sizes, **ids)), model.tokenizer)


def make_pieces(folder: Path) -> None:
    """A model whose vocabulary pretraining can use."""
    vocabulary = tokenizer_stage.Config(output=str(folder / "pieces"), files=(str(folder / "documents.txt"),), vocab_size=320)
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_heads": 2,
        "ffn_dim": 32,
        "max_position_embeddings": 32,
    }
    create.run(create.Config(output=str(folder / "pieces-model"), tokenizer=str(tokenizer_stage.run(vocabulary)), **sizes))


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(file.stem.rpartition("-")[2]) for file in folder.glob("checkpoint-*"))


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model/model.safetensors")


def assert_the_same(other: Path, whole: Path, start: Path) -> None:
    """Every logged figure to rounding, and the weights beside the way they went."""
    logs = [[json.loads(line) for line in (folder / "log.jsonl").open()] for folder in (other, whole)]
    assert [record["step"] for record in logs[0]] == [record["step"] for record in logs[1]]
    assert len(logs[0]) == TRAINING["max_steps"] + 3
    for record, expected in zip(*logs, strict=True):
        kind = "train" if "train" in expected else "validation"
        assert record[kind] == pytest.approx(expected[kind], rel=1e-4, abs=1e-5)
    before, after, found = load_file(start / "model.safetensors"), weights(whole), weights(other)
    moved, apart = (
        math.sqrt(sum((left[name] - after[name]).square().sum().item() for name in after)) for left in (before, found)
    )
    assert moved > 0.001
    assert apart < 1e-2 * moved  # Adam magnifies rounding where a gradient is almost 0


@pytest.fixture(scope="module")
def pair(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "pair", partial(two_processes, work))


def two_processes(work: Path, folder: Path) -> None:
    """All three trainings, whole; then shares of a model: one that one process began, and one that is stopped."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, signals.listening():
        signalled(patch, store.Output, "append_log", signal.SIGTERM, 5)  # 0 validated, 1, 2, 3, and here: 3 validated
        with pytest.raises(signals.Stopped):
            alone(work_of("finetune", work, folder / "begun"))
    assert checkpoints(folder / ".begun.partial") == [3]
    stages = [work_of(name, work, folder / name) for name in ("finetune", "calibrate", "pretrain")]
    begun = work_of("finetune", work, folder / "begun", shard_model=True)
    last = work_of("finetune", work, folder / "signalled", shard_model=True, gradient_checkpointing=True, save_steps=1)
    with torchrun(2, *start(folder, *stages, begun, last, also="families")) as started:
        assert started.stdout is not None
        said = []
        for line in started.stdout:
            said.append(line)
            if found := re.search(r"at 2 is (\d+)", line):
                os.kill(int(found[1]), signal.SIGTERM)
        _, errors = started.communicate(timeout=60)
    (folder / "said").write_text("".join(said))
    (folder / "errors").write_text(errors)


def test_fault_03_two_processes_train_as_one_does_and_a_signal_to_one_stops_both(work: Path, pair: Path) -> None:
    """Fine-tuning and pretraining with dropout, calibration with sampled pairs and with generation in validations; then two go on
    with what one began, each with a share of the model."""
    names = ("finetune", "calibrate", "pretrain")
    begun_with = dict.fromkeys(names, work / "model") | {"pretrain": work / "pieces-model/model"}
    for name in names:
        assert_the_same(pair / name, work / "whole" / name, begun_with[name])
    assert_the_same(pair / "begun", work / "whole/finetune", work / "model")
    heard, errors = (pair / "said").read_text(), (pair / "errors").read_text()
    assert heard.count("step 6: ") == 4  # one of them speaks
    assert heard.count("resuming after step 3") == 1
    assert heard.count("sums [[11.0], [11.0, 11.0], [11.0, 11.0, 11.0, 11.0, 11.0], [11.0]]") == 2
    measured = [json.loads(line).get("validation", {}) for line in (pair / "calibrate/log.jsonl").open()]
    assert all(figures["rouge"] > 5 for figures in measured if figures)
    assert heard.count("ends with 143") == 2
    assert errors.count("error: stopped by SIGTERM") == 1
    assert errors.count("the model's generation config asks for no_repeat_ngram_size=3") == 1
    assert checkpoints(pair / ".signalled.partial") == [1, 2]


def test_every_process_has_a_share_of_the_model_and_gathers_one_block_at_a_time(pair: Path) -> None:
    heard = (pair / "said").read_text()
    one, other = ([*map(int, each)] for each in re.findall(r"holds (\d+) of (\d+)", heard))
    assert one[0] + other[0] == one[1] == other[1]
    assert max(one[0], other[0]) < 0.52 * one[1]
    assert re.findall(r"gathered (\d)", heard)[-2:] == ["1", "1"]
    assert all(float(apart) < 1e-5 for apart in re.findall(r"apart (\S+)", heard))
    assert heard.count("shard_model needs a model of one of these kinds: t5, mt5, bart") == 2
    shares = sorted(file.name for file in (pair / ".signalled.partial").glob("share-*"))
    assert shares == [f"share-00000000{step}-{rank}-of-2.safetensors" for step in (1, 2) for rank in (0, 1)]


def go_on(pair: Path, name: str) -> Path:
    """What the two left behind, under another name."""
    shutil.copytree(pair / ".signalled.partial", pair / f".{name}.partial")
    return pair / name


def test_one_process_goes_on_with_what_two_shared_and_a_damaged_share_is_noticed(
    work: Path, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And has gone before there is another, which would remove the good one in its place."""
    output = go_on(pair, "signalled-alone")
    os.truncate(pair / ".signalled-alone.partial/share-000000002-1-of-2.safetensors", 2000)
    there: list[list[int]] = []

    def save(folder: Path, *others: Any) -> None:
        there.append(checkpoints(folder))
        checkpoint_save(folder, *others)

    checkpoint_save = checkpoint.save
    with patch.object(checkpoint, "save", save):
        assert_the_same(alone(work_of("finetune", work, output, save_steps=1)), work / "whole/finetune", work / "model")
    assert there[0] == [1]
    assert "resuming after step 1" in capsys.readouterr().out


def test_four_processes_train_as_one_does_and_an_error_is_told_once(work: Path, pair: Path, tmp_path: Path) -> None:
    """Four parts of a batch, and then one, which leaves three of them without a turn. With whole models, and with shares: of a
    T5 and its reference, by Adafactor, and of what two began."""
    shared = {name: tmp_path / name for name in ("t5", "pretrain")} | {"finetune": go_on(pair, "signalled-by-four")}
    stages = [work_of(name, work, output, shard_model=True) for name, output in shared.items()]
    wrong = work_of("finetune", work, tmp_path / "long", max_source_length=1000)
    ended = forked.run_several(4, *start(tmp_path, *stages, work_of("finetune", work, tmp_path / "whole"), wrong), seconds=240)
    said, errors = ended.stdout, ended.stderr
    begun_with = {"t5": work / "t5", "pretrain": work / "pieces-model/model", "finetune": work / "model"}
    for name, output in (*shared.items(), ("finetune", tmp_path / "whole")):
        assert_the_same(output, work / "whole" / name, begun_with[name])
    assert said.count("resuming after step 2") == 1
    assert said.count("sums [[1111.0], ") == 4
    assert errors.count("error: finetune.max_source_length is 1000, but the model has 32 positions: ") == 1
    assert "ends with 2" in said


ABORTS = """
import os
class Late:
    def __del__(self, abort=os.abort, is_worker="RANK" in os.environ):
        if is_worker:
            abort()
late = Late()
"""


def test_accelerate_launch_starts_the_same_calibration_with_shares_of_a_pegasus(work: Path, tmp_path: Path) -> None:
    """And no interpreter goes down meanwhile, where threads of torch.distributed would now and then abort it."""
    name, settings = work_of("calibrate", work, tmp_path / "out", shard_model=True)
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    given = (f"{key}={json.dumps(value)}" for key, value in settings.items())
    line = [sys.executable, "-m", *launcher, "-m", "calibeam", name, *given]
    *_, environment = start(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6: ") == 1
    assert_the_same(tmp_path / "out", work / "whole/calibrate", work / "model")


def test_a_mistake_on_the_command_line_is_told_once(tmp_path: Path) -> None:
    script, _, environment = start(tmp_path, code="from calibeam import cli; cli.main()")
    ended = forked.run_several(2, script, ["run", "--bogus"], environment, seconds=60)
    assert ended.returncode == 2
    assert ended.stderr.count("Error: No such option: --bogus") == 1


def test_fault_07_what_is_wrong_with_one_process_stops_all_and_is_told_once(work: Path, tmp_path: Path) -> None:
    """Nobody ends the others here: each has to end by itself. In one program, which makes use of the group again and again."""
    _, settings = work_of("finetune", work, tmp_path / "out")
    files = {split: str(work / "rows.jsonl") for split in ("train", "validation")}
    tables = {"output": str(tmp_path / "run"), "model": str(work / "model"), "prepare": files, "finetune": {}}
    ended = forked.run_several(2, *start(tmp_path, settings, tables, code=TROUBLE), seconds=120)
    assert ended.returncode == 0, ended.stderr
    said = {line.partition(": ")[0]: line.partition(": ")[2] for line in ended.stdout.splitlines() if " in " in line[:20]}

    def told(name: str, which: int = 0) -> str:
        """By one of them; the other only ends."""
        assert said[f"{name} in {1 - which}"] == "CalibeamError"
        return said[f"{name} in {which}"].removeprefix("CalibeamError, ")

    different = "processes that work together are about to do different things:"
    assert told("settings") == f"{tmp_path / 'out-settings'}: {different}"
    assert "  settings.gradient_checkpointing: False in the first, True in process 1" in ended.stdout
    assert "  settings.save_steps: 500 in the first, 3 in process 1" in ended.stdout
    assert told("versions").endswith(different)
    assert f"  versions.torch: '{torch.__version__}' in the first, '1.13' in process 1" in ended.stdout
    assert told("recipe") == f"the recipe: {different}"
    assert "  2. finetune.micro_batch_size: 4 in the first, 3 in process 1" in ended.stdout
    assert not (tmp_path / "run").exists()
    assert told("device").endswith(different)
    assert "  device: 'cpu' in the first, 'meta' in process 1" in ended.stdout
    assert told("disk").startswith(f"{tmp_path / '.out-disk.partial'} is not on a disk that all machines share: process 1 of 2")
    assert sorted(said[f"validation in {rank}"] for rank in (0, 1)) == ["Stopped", "Stopped, SIGTERM"]
    assert checkpoints(tmp_path / ".out-validation.partial") == [3, 6]
    assert told("save") == "there is no room"


def test_one_process_is_a_group_of_one_and_needs_no_other() -> None:
    tensor = torch.ones(3)
    with distributed.joined():
        distributed.add_up([tensor])
        assert distributed.spread(lambda some: [2 * each for each in some], [1, 2, 3]) == [2, 4, 6]
        assert distributed.by_first(lambda: "found") == "found"
        assert (distributed.rank(), distributed.size(), distributed.highest(3)) == (0, 1, 3)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert not torch.distributed.is_initialized()
