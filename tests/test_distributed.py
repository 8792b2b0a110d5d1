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
from calibeam import distributed, recipe, seq2seq, stages
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import create, decode, prepare, score
from calibeam.stages import tokenizer as tokenizer_stage
from conftest import sentence, tiny_model
from test_training import with_dropout

TRAINING: dict[str, Any] = {
    "batch_size": 7, "micro_batch_size": 2, "max_steps": 6, "eval_steps": 3, "learning_rate": 1e-3, "max_source_length": 20,
    "max_target_length": 6, "device": "cpu",
}  # fmt: skip
"""Seven examples of 16 in parts of two, so that no number of processes divides them, and a last batch of two."""

STAGES = """
import json, sys
from calibeam import distributed, recipe, stages
from calibeam.pipeline import Step
with distributed.joined():
    for name, settings in json.loads(sys.argv[1]):
        Step(name, recipe.build(stages.load(name).Config, name, settings)).run()
"""


def work_of(name: str, work: Path, output: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A stage and its settings."""
    places = {"data": str(work / "data"), "model": str(work / "model"), "output": str(output)}
    own: dict[str, Any] = {
        "finetune": {**places, "select": "perplexity"},
        "calibrate": {**places, "scored": str(work / "score"), "select_num_beams": 2, "max_drift": 0.0},
        "pretrain": {
            "model": str(work / "pieces-model"), "output": str(output), "files": [str(work / "documents.txt")], "workers": 0,
            "buffer_size": 20, "warmup_steps": 2, "mlm_ratio": 0.1, "validation_files": [str(work / "documents.txt")],
        },
    }  # fmt: skip
    return name, {**TRAINING, **own[name], **changes}


def alone(stage: tuple[str, dict[str, Any]]) -> Path:
    module = stages.load(stage[0])
    return module.run(recipe.build(module.Config, *stage))


def torchrun(processes: int, script: Path, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # noqa: S603
        [*line, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def together(processes: int, work: Path, *some: tuple[str, dict[str, Any]]) -> str:
    """What several processes said of stages that they ran together."""
    script = work / "stages.py"
    script.write_text(STAGES)
    with torchrun(processes, script, json.dumps(some)) as started:
        said, errors = started.communicate(timeout=240)
    assert started.returncode == 0, errors
    return said


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """What the stages read; `whole` has what each makes on one process. Half of the targets are what the model writes itself,
    so that ROUGE is not 0."""
    folder = tmp_path_factory.mktemp("distributed")
    model = Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer)
    seq2seq.save(model, folder / "model")
    with_dropout(0.2, folder / "model")
    texts = [sentence(i, 4 + i % 7) for i in range(16)]
    sources, _ = model.encode_sources(texts, 20)
    search = {"num_candidates": 2, "max_new_tokens": 6}
    outputs = [row["texts"][0] for row in decode.decode_all(model, texts, sources, search, seed=0, description="")]
    targets = [output.strip() if i % 2 and output.strip() else sentence(i, 1 + i % 4) for i, output in enumerate(outputs)]
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
    return folder


def make_pieces(folder: Path) -> None:
    """A model whose vocabulary pretraining can use."""
    vocabulary = tokenizer_stage.Config(output=str(folder / "pieces"), files=(str(folder / "documents.txt"),), vocab_size=150)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 32, "max_position_embeddings": 32}
    create.run(create.Config(output=str(folder / "pieces-model"), tokenizer=str(tokenizer_stage.run(vocabulary)), **sizes))


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
    assert moved > 0.01
    assert apart < 1e-3 * moved
