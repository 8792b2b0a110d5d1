"""Training on several processes, really started by torchrun, beside training on one."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import calibeam
from calibeam import distributed, recipe, seq2seq, signals, stages, store
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
from calibeam import cli, distributed, recipe, stages, training
from calibeam.pipeline import Step

step = training.TrainingStep.__call__

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once, or processes mix their lines

def slowly(self, batch, number):
    if self._config.output.endswith("signalled") and number == 2:
        say(f"holds {len(self._optimizer.optim.state)} of {len(self._parameters)}")
        if distributed.rank() == 1:
            say(f"at 2 is {os.getpid()}")
            time.sleep(1.5)
    return step(self, batch, number)

def work():
    distributed.BUCKET = 3  # so that there are three: of several tensors, of a larger one, and what is left
    ours = [torch.full((size,), 10.0 ** distributed.rank()) for size in (1, 2, 5, 1)]
    distributed.add_up(ours)
    say(f"sums {[tensor.tolist() for tensor in ours]}")
    distributed.BUCKET = 1000
    for name, settings in json.loads(sys.argv[1]):
        Step(name, recipe.build(stages.load(name).Config, name, settings)).run()

training.TrainingStep.__call__, cli.app = slowly, work
try:
    cli.main()
except SystemExit as end:
    say(f"ends with {end.code}")
    raise
"""


def work_of(name: str, work: Path, output: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A stage and its settings."""
    places = {"data": str(work / "data"), "model": str(work / "model"), "output": str(output)}
    own: dict[str, Any] = {
        "finetune": {**places, "select": "perplexity"},
        "calibrate": {**places, "scored": str(work / "score"), "select": "perplexity", "learning_rate": 1e-4},
        "pretrain": {
            "model": str(work / "pieces-model"), "output": str(output), "files": [str(work / "documents.txt")], "workers": 0,
            "buffer_size": 20, "warmup_steps": 2, "mlm_ratio": 0.1, "validation_files": [str(work / "documents.txt")],
        },
    }  # fmt: skip
    return name, {**TRAINING, **own[name], **changes}


def alone(stage: tuple[str, dict[str, Any]]) -> Path:
    module = stages.load(stage[0])
    return module.run(recipe.build(module.Config, *stage))


def torchrun(processes: int, folder: Path, *some: tuple[str, dict[str, Any]]) -> subprocess.Popen[str]:
    """Several processes at work on some stages."""
    script = folder / "stages.py"
    script.write_text(STAGES)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # noqa: S603
        [*line, json.dumps(some)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    places = {"data": str(folder / "data"), "model": str(folder / "model"), "device": "cpu"}
    decode.run(decode.Config(**places, output=str(folder / "decode"), num_candidates=4, max_new_tokens=6, max_source_length=20))
    score.run(score.Config(**places, candidates=str(folder / "decode"), output=str(folder / "score")))
    make_pieces(folder)
    for name in ("finetune", "calibrate", "pretrain"):
        alone(work_of(name, folder, folder / "whole" / name))


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


def test_fault_03_two_processes_train_as_one_does_and_a_signal_to_one_stops_both(work: Path, tmp_path: Path) -> None:
    """Fine-tuning and pretraining with dropout, calibration with sampled pairs and with generation in validations; then two go on
    with what one began, and one with what two began, where the two share the optimizer's state."""
    with pytest.MonkeyPatch.context() as patch, signals.listening():
        signalled(patch, store.Output, "append_log", signal.SIGTERM, 5)  # 0 validated, 1, 2, 3, and here: 3 validated
        with pytest.raises(signals.Stopped):
            alone(work_of("finetune", work, tmp_path / "begun"))
    assert checkpoints(tmp_path / ".begun.partial") == [3]

    names = ("finetune", "calibrate", "pretrain")
    stages = [work_of(name, work, tmp_path / name) for name in names]
    last = work_of("finetune", work, tmp_path / "signalled", shard_optimizer=True)
    begun = work_of("finetune", work, tmp_path / "begun", shard_optimizer=True)
    with torchrun(2, tmp_path, *stages, begun, last) as started:
        assert started.stdout is not None
        said = []
        for line in started.stdout:
            said.append(line)
            if found := re.search(r"at 2 is (\d+)", line):
                os.kill(int(found[1]), signal.SIGTERM)
        _, errors = started.communicate(timeout=60)

    start = dict.fromkeys(names, work / "model") | {"pretrain": work / "pieces-model/model"}
    for name in names:
        assert_the_same(tmp_path / name, work / "whole" / name, start[name])
    assert_the_same(tmp_path / "begun", work / "whole/finetune", work / "model")
    heard = "".join(said)
    assert heard.count("step 6: ") == 4  # one of them speaks
    assert heard.count("going on after step 3") == 1
    assert heard.count("sums [[11.0], [11.0, 11.0], [11.0, 11.0, 11.0, 11.0, 11.0], [11.0]]") == 2
    measured = [json.loads(line).get("validation", {}) for line in (tmp_path / "calibrate/log.jsonl").open()]
    assert all(figures["rouge"] > 5 for figures in measured if figures)

    one, other = ([*map(int, each)] for each in re.findall(r"holds (\d+) of (\d+)", heard))
    assert one[0] + other[0] == one[1] == other[1]
    assert min(one[0], other[0]) > 0
    assert heard.count("ends with 143") == 2
    assert errors.count("error: stopped by SIGTERM") == 1
    assert checkpoints(tmp_path / ".signalled.partial") == [2]
    assert_the_same(alone(last), work / "whole/finetune", work / "model")


def test_four_processes_train_as_one_does_and_an_error_is_told_once(work: Path, tmp_path: Path) -> None:
    """Four parts of a batch, and then one, which leaves three of them without a turn."""
    names = ("finetune", "calibrate")
    stages = [work_of(name, work, tmp_path / name) for name in names]
    with torchrun(4, tmp_path, *stages, work_of("finetune", work, tmp_path / "long", max_source_length=1000)) as started:
        said, errors = started.communicate(timeout=240)
    for name in names:
        assert_the_same(tmp_path / name, work / "whole" / name, work / "model")
    assert said.count("sums [[1111.0], ") == 4
    assert errors.count("error: max_source_length is 1000, but the model has 32 positions") == 1
    assert "ends with 2" in said


def test_one_process_is_a_group_of_one_and_needs_no_other() -> None:
    tensor = torch.ones(3)
    with distributed.joined():
        distributed.add_up([tensor])
        assert distributed.spread(lambda some: [2 * each for each in some], [1, 2, 3]) == [2, 4, 6]
        assert distributed.by_first(lambda: "found") == "found"
        assert (distributed.rank(), distributed.size(), distributed.highest(3)) == (0, 1, 3)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert not torch.distributed.is_initialized()
